"""A captured step in the operators that are planned: none writes, and none that should be two.

Placements belong to values, so a value must not change under its readers. An operator that writes
to what nobody else holds, as a normalization adds its epsilon, becomes its functional twin in its
place. Where more is written, the graph runs once more on its fake tensors under
``torch.func.functionalize``, which keeps the annotations of the nodes it replaces and takes as long
as the first capture. So it does where an operator can be sharded only if it is taken apart
(``decompositions``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from gt_autoparallel._torch_internals import (
    OpOverload,
    functional_twin,
    make_fx,
    returns_new_storage,
    writes_to_arguments,
)
from gt_autoparallel.errors import UnsupportedModelError
from gt_trace import TracedStep

_COPY = torch.ops.aten.copy_.default
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
"""Its result lies in its argument's storage, though its schema does not say so."""


def make_functional(traced: TracedStep) -> GraphModule:
    """The graph of ``traced`` in which no operator writes to its arguments or has a decomposition.

    Raises:
        UnsupportedModelError: the step changes a parameter, a buffer or an argument; all of them
            are named.
    """
    graph_module = traced.graph_module
    nodes = graph_module.graph.nodes
    for node in nodes:
        if _writes(node):
            _return_instead(node, traced)
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


def _return_instead(node: Node, traced: TracedStep) -> None:
    """Makes a write to a value that nobody else holds a new value of the same form.

    *Before*: ``mean = aten.mean(x); y = aten.add_(mean, eps)``, and only ``y`` is read.
    *After*: ``mean = aten.mean(x); y = aten.add(mean, eps)``.
    """
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or set(source.users) != {node}:
        return
    maker = source.target
    if not isinstance(maker, OpOverload) or maker is _UNSAFE_VIEW or not returns_new_storage(maker):
        return
    assert isinstance(node.target, OpOverload)  # it writes
    twin = functional_twin(node.target)
    if twin is None:
        return
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    with traced.fake_mode:
        value = twin(*args, **kwargs)
    if _form(value) == _form(node.meta["val"]):
        node.target = twin


def _form(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return None
    return (value.shape, value.stride(), value.dtype, value.device)


# Operators that can be sharded only as two: what capture replaces them by.
#
# A mean over samples divides by the weight of all samples. As one operator it needs every sample
# on every rank; as a sum and a division, each rank sums its own samples, and two numbers are
# reduced.
_MEAN, _SUM = 1, 2
"""Values of the argument ``reduction``."""

_NLL_LOSS = torch.ops.aten.nll_loss_forward.default


def is_decomposed(target: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator with these arguments has a decomposition here."""
    return target is _NLL_LOSS and args[3] == _MEAN


def _mean_nll_loss(
    log_probabilities: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
) -> Any:
    """The sum over samples, divided by their weight: what the operator computes itself."""
    if reduction != _MEAN:
        return NotImplemented
    total, total_weight = _NLL_LOSS(log_probabilities, target, weight, _SUM, ignore_index)
    return torch.ops.aten.div.Tensor(total, total_weight), total_weight


DECOMPOSITIONS: Mapping[OpOverload, Callable[..., Any]] = MappingProxyType(
    {_NLL_LOSS: _mean_nll_loss}
)
"""Decompositions as ``make_fx`` takes them: NotImplemented leaves the operator as it is."""
