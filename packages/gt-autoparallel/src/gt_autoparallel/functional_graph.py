"""A captured step in the operators that are planned: none writes, and none that should be two.

Placements belong to values, so a value must not change under its readers. Most models write
nothing; where one does, the graph runs once more on its fake tensors under
``torch.func.functionalize``, which keeps the annotations of the nodes it replaces. So it does where
an operator can be sharded only if it is taken apart (``rules/decompositions.py``).
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Interpreter, Node

from gt_autoparallel._torch_internals import OpOverload, make_fx, writes_to_arguments
from gt_autoparallel.errors import UnsupportedModelError
from gt_autoparallel.rules.decompositions import DECOMPOSITIONS, is_decomposed
from gt_trace import TracedStep

__all__ = ["make_functional"]

_COPY = torch.ops.aten.copy_.default


def make_functional(traced: TracedStep) -> GraphModule:
    """The graph of ``traced`` in which no operator writes to its arguments or has a decomposition.

    Raises:
        UnsupportedModelError: the step changes a parameter, a buffer or an argument; all of them
            are named.
    """
    graph_module = traced.graph_module
    nodes = graph_module.graph.nodes
    if not any(_writes(node) or is_decomposed(node.target, node.args) for node in nodes):
        return graph_module
    replay = torch.func.functionalize(Interpreter(graph_module).run, remove="mutations")
    with traced.fake_mode, torch.fx.traceback.preserve_node_meta():
        functional: GraphModule = make_fx(replay, dict(DECOMPOSITIONS))(*traced.example_inputs)
    placeholders = functional.graph.find_nodes(op="placeholder")
    names = dict(zip(placeholders, traced.inputs, strict=True))
    changed = [
        f"{names[node.args[0]].kind} {names[node.args[0]].name}"
        for node in functional.graph.nodes
        if node.target is _COPY and node.args[0] in names
    ]
    if changed:
        raise UnsupportedModelError(
            "the forward writes to what belongs to the model or its caller, which a placed model "
            "could not do on its shards; return the new values instead: " + ", ".join(changed)
        )
    return functional


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and writes_to_arguments(node.target)
