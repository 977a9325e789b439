"""How a rule sees the call that it judges, and what it answers.

A rule says two things of an operator: which state its result has, given the states of its
operands, and which of its arguments are other ones in a chunk: literal sizes that hold the chunked
extent, and whole operands of which a chunk needs its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from gt_passes._torch_internals import OpOverload, value_of
from gt_passes.ep_overlap.chunk_states import (
    Layout,
    Local,
    Partial,
    Sharded,
    State,
    Whole,
    layout_of,
)

__all__ = ["Call", "Cut", "NotProvenError", "Outcome", "Rule", "Scaled", "rule", "rule_of"]


class NotProvenError(Exception):
    """What the operator does to chunks is not proven to be right; the text says why."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """Stands for a literal size: ``factor`` times the extent of the chunk."""

    factor: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Stands for a whole operand: the chunk's part of it."""

    node: Node
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The answer of a rule."""

    state: State | tuple[State, ...]
    """Of the result; a tuple for an operator with many."""

    changed: Mapping[str, Any] = field(default_factory=dict)
    """By name of the argument: what stands in its place, with ``Scaled`` and ``Cut`` inside."""


class Call:
    """One node that runs in every chunk, with the states of its operands.

    Args:
        node: the node of the unchunked graph.
        states: of every node that runs in chunks, and of those that enter the region sharded;
            every other operand is whole.
        extent: of the dimension that is chunked.
        partner: the forward node that the node differentiates, or None.
        keeps_casts: whether sums stay behind casts that lose bits.
    """

    def __init__(
        self,
        node: Node,
        states: Mapping[Node, State | tuple[State, ...]],
        *,
        extent: int,
        partner: Node | None = None,
        keeps_casts: bool = False,
    ) -> None:
        self.node = node
        self.extent = extent
        self.partner = partner
        self.keeps_casts = keeps_casts
        self._states = states

    def get(self, name: str, default: Any = None) -> Any:
        """An argument by the name that the operator's schema gives it."""
        assert isinstance(self.node.target, OpOverload)  # rules are registered for those only
        for position, declared in enumerate(self.node.target._schema.arguments):
            if declared.name != name:
                continue
            if name in self.node.kwargs:
                return self.node.kwargs[name]
            if position < len(self.node.args) and not declared.kwarg_only:
                return self.node.args[position]
            return declared.default_value if declared.has_default_value() else default
        return default

    def operand(self, name: str) -> Node:
        """An argument that is a tensor."""
        value = self.get(name)
        if not isinstance(value, Node):
            raise NotProvenError(f"its argument {name} is {value!r}, not a tensor")
        return value

    @property
    def tensors(self) -> list[Node]:
        """Every operand that is a tensor, each once, in order."""
        return [
            node for node in self.node.all_input_nodes if isinstance(value_of(node), torch.Tensor)
        ]

    def state(self, node: Node) -> State:
        """The state of an operand."""
        state = self._states.get(node, Whole())
        if isinstance(state, tuple):
            raise NotProvenError(f"it reads all results of {node.name} at once")
        return state

    def layout(self, node: Node) -> Layout | None:
        """Where the extent stands in an operand, if it does."""
        return layout_of(self.state(node))

    def shape(self, node: Node) -> tuple[int, ...]:
        """Of an operand of the unchunked graph. Sizes that depend on data are symbolic."""
        value = value_of(node)
        assert isinstance(value, torch.Tensor)
        return tuple(value.shape)

    def rank(self, node: Node) -> int:
        """Number of dimensions of an operand."""
        return len(self.shape(node))

    def dim(self, name: str, node: Node, default: Any = None) -> int:
        """An argument that names a dimension of ``node``, counted from the front."""
        dim = self.get(name, default)
        if not isinstance(dim, int):
            raise NotProvenError(f"its argument {name} is {dim!r}")
        return dim % max(self.rank(node), 1)

    @property
    def result(self) -> torch.Tensor:
        """The unchunked result of an operator with one."""
        value = value_of(self.node)
        if not isinstance(value, torch.Tensor):
            raise NotProvenError("its result is not one tensor")
        return value

    def like(self, node: Node, layout: Layout | None = None) -> State:
        """The state of an operand for a result that holds the same values, laid out so."""
        return with_layout(self.state(node), layout)

    def as_sharded(self, node: Node, layout: Layout) -> Node | Cut:
        """``node``, or its part for the chunk, once it is sure to be sharded as ``layout`` says."""
        state = self.state(node)
        if isinstance(state, Whole):
            if self.shape(node)[layout.dim] != layout.factor * self.extent:
                raise NotProvenError(f"{node.name} has no dimension of the chunked extent to cut")
            return Cut(node, layout)
        if layout_of(state) != layout or isinstance(state, Partial):
            raise NotProvenError(
                f"{node.name} is {describe(state)}, and should be {describe(Sharded(layout))}"
            )
        return node

    def joined_state(self, operands: Sequence[Node], layout: Layout) -> State:
        """Sharded; local as soon as one operand is."""
        local = [s for s in map(self.state, operands) if isinstance(s, Local)]
        if local:
            return Local(layout, permuted=any(state.permuted for state in local))
        return Sharded(layout)


def with_layout(state: State, layout: Layout | None) -> State:
    """The same kind of state with another layout."""
    if isinstance(state, Sharded):
        assert layout is not None
        return Sharded(layout)
    if isinstance(state, Local):
        return Local(layout, permuted=state.permuted)
    return state


def describe(state: State | tuple[State, ...]) -> str:
    """A state in words, for messages."""
    if isinstance(state, tuple):
        return "a tuple"
    if isinstance(state, Sharded):
        return f"sharded along dim {state.layout.dim}"
    if isinstance(state, Partial):
        return "a term of a sum"
    if isinstance(state, Local):
        return "local to the chunk"
    return "whole"


def substitute(value: Any, nodes: Mapping[Node, Any]) -> Any:
    """``value`` with nodes replaced, wherever they stand in it."""

    def load(leaf: Any) -> Any:
        return nodes.get(leaf, leaf) if isinstance(leaf, Node) else leaf

    return map_aggregate(value, load)


Rule = Callable[[Call], Outcome | State]

_RULES: dict[object, Rule] = {}


def rule(*targets: OpOverload) -> Callable[[Rule], Rule]:
    """Register the rule of operators. Also for operators of other packages.

    Raises:
        ValueError: an operator has a rule already.
    """

    def register(function: Rule) -> Rule:
        for target in targets:
            if target in _RULES:
                raise ValueError(f"{target} has a chunk rule already")
            _RULES[target] = function
        return function

    return register


def rule_of(target: object) -> Rule | None:
    """The rule of an operator, or None."""
    return _RULES.get(target)
