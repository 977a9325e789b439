"""Which node of a captured graph an error is from, and which line of the user's program made it.

A replay runs code that FX generated, one line a node. Where it fails, the traceback leads to that
line and by the variable that it sets to the node, so that a run without errors pays nothing.
"""

from __future__ import annotations

import linecache
import traceback
from types import FrameType

from torch.fx import GraphModule, Node

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
    lines = [", ".join([f"in a captured graph: node {node.name} ({node.target})", *where])]
    if node.stack_trace:
        lines.append("  " + node.stack_trace)
    return "\n".join(lines)
