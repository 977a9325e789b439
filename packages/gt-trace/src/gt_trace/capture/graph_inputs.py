"""What the placeholders of a captured graph stand for, and what a call must pass for them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.fx import Graph

from gt_trace.capture.input_uses import InputUse, input_uses
from gt_trace.capture.subclass_layout import TensorLayout

InputKind = Literal["parameter", "buffer", "optimizer_state", "argument", "tangent", "saved"]
"""What an input is. A tangent is the gradient that arrives at an output and saved is what a forward
keeps for its backward: both occur only where the two are graphs of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInput:
    """What one placeholder of the graph stands for."""

    kind: InputKind
    name: str
    """Fully qualified name of the state, or path of the argument as ``kwargs['positions']``."""

    aliases: tuple[str, ...] = ()
    """Further names of a tied parameter."""

    leaf: int = 0
    """Position among the plain tensors of which a tensor subclass is made; 0 for a plain tensor."""

    uses: tuple[InputUse, ...] = ()
    """How the graph uses the memory of this input, besides reading its elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentSignature:
    """What a call must pass for one leaf of the argument tree."""

    name: str
    is_tensor: bool
    constant: Any = None
    """The value of a leaf that is no tensor; it is part of the graph."""

    shape: tuple[int | None, ...] = ()
    """Sizes of a tensor, with None for dimensions that are dynamic."""

    dtype: torch.dtype | None = None
    layout: TensorLayout | None = None
    requires_grad: bool = False
    same_as: str | None = None
    """An input before this one that is the same Python object, by its name."""

    attributes: tuple[tuple[str, Any], ...] = ()
    """Attributes that were set on the tensor, except tensors."""

    def describe(self) -> str:
        """As it was captured, for error messages."""
        if not self.is_tensor:
            return repr(self.constant)
        dims = ", ".join("any" if size is None else str(size) for size in self.shape)
        return f"{self.dtype} [{dims}]"


def same_constant(value: Any, captured: Any) -> bool:
    """Return whether a step computes the same with two values that are no tensors.

    NaN is NaN, and 0.0 is not -0.0, of which the reciprocals differ; nor is 1 True.
    """
    if type(value) is not type(captured):
        return False
    if isinstance(value, float):
        return repr(value) == repr(captured)
    if isinstance(value, complex):
        return same_constant(value.real, captured.real) and same_constant(value.imag, captured.imag)
    return bool(value == captured)


_PREFIX = {
    "parameter": "p",
    "buffer": "b",
    "optimizer_state": "o",
    "argument": "a",
    "tangent": "t",
    "saved": "s",
}


def with_uses(
    inputs: Sequence[GraphInput], graph: Graph, reads: Mapping[str, Collection[InputUse]]
) -> tuple[GraphInput, ...]:
    """Return the inputs of a graph, with how it uses them; ``reads`` are ``layout_reads``."""
    further = [reads.get(f"{each.kind} {each.name}", ()) for each in inputs]
    pairs = zip(inputs, input_uses(graph, further), strict=True)
    return tuple(replace(each, uses=uses) if uses else each for each, uses in pairs)


def name_placeholders(graph: Graph, inputs: Sequence[GraphInput]) -> None:
    """Placeholders read as what they stand for: ``p_layers_0_attention_wq_weight``."""
    placeholders = graph.find_nodes(op="placeholder")
    for node, graph_input in zip(placeholders, inputs, strict=True):
        words = re.sub(r"\W+", "_", graph_input.name).strip("_")
        leaf = f"_{graph_input.leaf}" if graph_input.leaf else ""
        # A node's own rename keeps names unique; the target is what the generated code declares.
        node._rename(f"{_PREFIX[graph_input.kind]}_{words}{leaf}")
        node.target = node.name
