"""Which node of a captured graph an error is from, and which line of the user's program made it.

A replay runs code that FX generated, one line a node. Where it fails, the traceback leads to that
line and by the variable that it sets to the node, so that a run without errors pays nothing. Of an
exchange, which fails where another rank has ended or waits elsewhere, the ranks are told.
"""

from __future__ import annotations

import linecache
import operator
import traceback
from types import FrameType

import torch
from torch import distributed as dist
from torch.fx import GraphModule, Node

from gt_trace._torch_internals import OpOverload, process_group
from gt_trace.node_metadata import module_fqn, phase_of


def note_failing_node(error: BaseException) -> None:
    """Add a note to an error: node, operator, module and source line; none if no graph raised it.

    The error stays the one that it is, so that whoever waits for its type gets it.
    """
    found = [_node_at(*place) for place in traceback.walk_tb(error.__traceback__)]
    nodes = [node for node in found if node is not None]
    if nodes:
        error.add_note(_described(nodes[-1]))


def _node_at(frame: FrameType, line: int) -> Node | None:
    """The node that a line of generated code computes; None for other code."""
    module = frame.f_locals.get("self")
    if not isinstance(module, GraphModule):
        return None
    text = linecache.getline(frame.f_code.co_filename, line, frame.f_globals)
    name = text.replace(":", " ").strip().partition(" ")[0]
    return next((node for node in module.graph.nodes if node.name == name), None)


def _described(node: Node) -> str:
    where = [
        f"{what} {value}"
        for what, value in (("module", module_fqn(node)), ("phase", phase_of(node)))
        if value
    ]
    ranks = _ranks_of_exchange(node)
    if ranks:
        where.append(f"exchange of ranks {', '.join(map(str, ranks))}")
    lines = [", ".join([f"in a captured graph: node {node.name} ({node.target})", *where])]
    if node.stack_trace:
        lines.append("  " + node.stack_trace)
    return "\n".join(lines)


def _ranks_of_exchange(node: Node) -> list[int]:
    """The global ranks that take part in what a node launches or waits for; none elsewhere."""
    while node.target in (operator.getitem, torch.ops._c10d_functional.wait_tensor.default):
        launched = node.args[0]
        assert isinstance(launched, Node)
        node = launched
    if not isinstance(node.target, OpOverload):
        return []
    names = [argument.name for argument in node.target._schema.arguments]
    if "group_name" not in names:
        return []
    index = names.index("group_name")
    given = node.args[index] if index < len(node.args) else node.kwargs.get("group_name")
    # A string, or since torch 2.15 possibly the group itself.
    group = process_group(given) if isinstance(given, str) else given
    return dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else []
