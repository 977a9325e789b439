"""The graph that is planned: operators on global tensors, with values that know their tensors.

It is made once from a captured joint graph (``capture.py``) and never changed by planning. Each
place where a value is used (a *use*) may want its own layout. A value with several uses gets a
``share`` node of its own: the value is moved at most once to a common layout, from which each use
may move on. So one all-gather serves the query, key and value projections, and one unshard of a
parameter serves forward and backward, as in a hand-placed model. A share node computes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

NodeKind = Literal[
    "parameter",
    "buffer",
    "input",
    "tangent",
    "operator",
    "share",
    "experts",
    "output",
    "gradient",
    "input_gradient",
]
"""parameter, buffer, input, tangent (gradient of an output): made by nobody in the graph.
operator: one ATen operator. share: the identity, see above. experts: the routed experts of one
layer, forward or backward, as one node.
output: takes one output of the model. gradient: takes the gradient of one parameter.
input_gradient: takes the gradient of one input, if it was asked for."""

SINKS: tuple[NodeKind, ...] = ("output", "gradient", "input_gradient")
"""Kinds of nodes that take a value and give none."""

NodePhase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A global tensor without data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor, dense."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Value:
    """Output ``output`` of node ``node`` (indices), as it stands in the arguments of others."""

    node: int
    output: int = 0


def with_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """Arguments of an operator, in plain containers, with what ``change`` makes of each leaf."""
    if isinstance(tree, tuple):
        return tuple([with_leaves(change, each) for each in tree])
    if isinstance(tree, list):
        return [with_leaves(change, each) for each in tree]
    if isinstance(tree, dict):
        return {key: with_leaves(change, each) for key, each in tree.items()}
    return change(tree)


def values_in(arguments: Any) -> list[Value]:
    """The values in arguments of an operator, in the order of a flattened call."""
    found: list[Value] = []
    with_leaves(lambda leaf: found.append(leaf) if isinstance(leaf, Value) else None, arguments)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One place where a value is used: the ``position``-th tensor argument of ``consumer``."""

    value: Value
    consumer: int
    position: int
    """Index into ``PlacementNode.operands`` of the consumer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementNode:
    """One node. ``args`` and ``kwargs`` hold ``Value``s where the operator takes tensors."""

    index: int
    """Position in ``PlacementGraph.nodes``; arguments have smaller ones."""

    name: str
    """Unique and stable: the same model gives the same names."""

    kind: NodeKind
    target: Any
    """The OpOverload of an operator; for parameters, buffers, inputs, outputs and gradients their
    name as a string; for experts the name of the module."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[TensorSpec | None, ...]
    """One for each output of the operator; None where it gives no tensor. Empty for the kinds
    output, gradient and input_gradient."""

    module: str = ""
    """Fully qualified name of the module that ran it, or whose forward it differentiates."""

    phase: NodePhase = "forward"
    line: str = field(default="", compare=False, repr=False)
    """The line of the model that called it, if the graph was captured in this process."""

    operands: tuple[Value, ...] = field(init=False, compare=False, repr=False)
    """The values in ``args`` and ``kwargs``, in the order of a flattened call. A value that stands
    there twice is two operands."""

    constants: str = field(init=False, compare=False, repr=False)
    """``args`` and ``kwargs`` as text, in which all values look the same: a key for what depends on
    flags and numbers, and not on which values are meant."""

    def output(self, index: int = 0) -> TensorSpec:
        """The global tensor that the node gives as its ``index``-th output."""
        spec = self.outputs[index]
        assert spec is not None, "a value is a tensor"
        return spec

    def __post_init__(self) -> None:
        arguments = (self.args, self.kwargs)
        anonymous = with_leaves(lambda leaf: Value if isinstance(leaf, Value) else leaf, arguments)
        object.__setattr__(self, "operands", tuple(values_in(arguments)))
        object.__setattr__(self, "constants", repr(anonymous))


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLeaf:
    """One leaf of the arguments of the model's forward."""

    name: str
    node: int | None
    """Its input node; None for a constant, and for a tensor that nothing reads."""

    is_tensor: bool
    constant: Any = None
    """Its value, if it is no tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultLeaf:
    """One leaf of what the model's forward returns."""

    name: str
    node: int | None
    """Its output node; None for a constant."""

    tangent: int | None
    """The node of its gradient; None if nothing that is trained depends on it, or if what it
    gives to the parameters' gradients is nothing."""

    constant: Any = None
    """Its value, if it is no tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInterface:
    """How the model is called, and what it returns: trees over nodes of the graph."""

    input_spec: pytree.TreeSpec
    """Structure of ``(args, kwargs)`` of the forward."""

    inputs: tuple[InputLeaf, ...]
    output_spec: pytree.TreeSpec
    outputs: tuple[ResultLeaf, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementGraph:
    """Nodes in an order in which arguments come first."""

    nodes: tuple[PlacementNode, ...]
    parameter_aliases: dict[str, str]
    """Other names of tied parameters, to the name of the node that stands for all of them."""

    interface: ModelInterface | None = field(default=None, compare=False, repr=False)
    """How the model is called, if the graph was captured in this process; one out of a plan file
    does not know."""

    uses: tuple[Use, ...] = field(init=False, compare=False, repr=False)
    """Every use of every value, by consumer and position."""

    def __post_init__(self) -> None:
        uses = tuple(
            Use(value=value, consumer=node.index, position=position)
            for node in self.nodes
            for position, value in enumerate(node.operands)
        )
        object.__setattr__(self, "uses", uses)

    def spec(self, value: Value) -> TensorSpec:
        """The tensor that ``value`` names."""
        return self.nodes[value.node].output(value.output)

    def operand_specs(self, node: PlacementNode) -> tuple[TensorSpec, ...]:
        """The global tensors of a node's operands, in their order."""
        return tuple(map(self.spec, node.operands))

    def of_kind(self, kind: NodeKind) -> tuple[PlacementNode, ...]:
        """The nodes of one kind, in order."""
        return tuple(node for node in self.nodes if node.kind == kind)
