"""Random numbers that a capture would draw twice: refused.

Activation checkpointing computes a part of the forward again inside the backward. Run eagerly it
sets the random number generator back first, so that dropout drops the same elements again. That is
no operator, so a graph has nothing of it: its backward would belong to another forward.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from gt_trace.errors import CaptureError
from gt_trace.node_metadata import module_fqn, phase_of


def refuse_repeated_draws(graph_module: GraphModule) -> None:
    """Refuse random operators of the backward that may repeat one of the forward.

    Those are the ones for which the forward has the same operator with results of the same form: a
    graph does not say what was computed again. Other random numbers of a backward, as
    an ``autograd.Function`` may draw them, are fine.

    Raises:
        CaptureError: lists every such operator.
    """
    forward = {_form(node) for node in _draws(graph_module) if phase_of(node) != "backward"}
    repeated = [
        node
        for node in _draws(graph_module)
        if phase_of(node) == "backward" and _form(node) in forward
    ]
    if not repeated:
        return
    lines = [f"{node.name} ({node.target}){_where(node)}" for node in repeated]
    raise CaptureError(
        "the backward draws random numbers again that the forward drew, as activation "
        "checkpointing of dropout does; in a graph they would be others, and the gradients wrong. "
        "Keep operators that draw out of checkpointed functions, or leave checkpointing out and "
        "recompute by a memory policy, which keeps what was drawn:\n  " + "\n  ".join(lines)
    )


def _draws(graph_module: GraphModule) -> Iterator[Node]:
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            yield from filter(advances_generator, module.graph.nodes)


def advances_generator(node: Node) -> bool:
    """Return whether a node draws random numbers."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, declared in enumerate(target._schema.arguments):
        if declared.name == "dropout_p":  # attention, which draws only for dropout
            if position < len(node.args) and not declared.kwarg_only:
                return bool(node.args[position] != 0)
            return bool(node.kwargs.get("dropout_p", declared.default_value) != 0)
    return True


def explicit_generator(node: Node, root: object) -> torch.Generator | None:
    """Return the generator that is an argument of a node; None for a node without one.

    Args:
        node: draws.
        root: has the attributes of the node's graph; a generator is one in newer versions of torch.
    """
    for argument in (*node.args, *node.kwargs.values()):
        value: object = argument
        if isinstance(argument, Node) and argument.op == "get_attr":
            value = getattr(root, str(argument.target), None)
        if isinstance(value, torch.Generator):
            return value
    return None


def _form(node: Node) -> tuple[object, ...]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    forms = [
        (tuple(map(str, each.shape)), each.dtype) if isinstance(each, torch.Tensor) else None
        for each in values
    ]
    return (node.target, *forms)


def _where(node: Node) -> str:
    module = module_fqn(node)
    return f" in {module}" if module else ""
