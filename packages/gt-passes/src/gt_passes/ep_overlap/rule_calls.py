"""How a rule sees the call that it judges, and what it answers.

A rule says two things of an operator: which state its result has, given the states of its
operands, and what a chunk is given in place of some arguments: its own part of whole operands, and
literal sizes that hold the chunked extent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node

from gt_passes._torch_internals import HigherOrderOperator, OpOverload, value_of
from gt_passes.analysis.node_calls import arguments_of
from gt_passes.ep_overlap.chunk_states import Layout, State, Whole, describe, layout_of


class NotProvenError(Exception):
    """What the operator does to chunks is not proven to be right; the text says why."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """Stands for a literal size: ``factor`` times the extent of the chunk."""

    factor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOutcome:
    """The answer of a rule."""

    state: State | tuple[State, ...]
    """The state of the result; a tuple for an operator with many."""

    cuts: Mapping[Node, Layout] = field(default_factory=dict)
    """Whole operands of which a chunk is given its part, and how they are cut."""

    args: tuple[Any, ...] | None = None
    """Positional arguments in a chunk, with ``Scaled`` inside; None where they are the node's."""


@dataclass(frozen=True, kw_only=True)
class RuleCall:
    """One node that runs in every chunk, with what is known of its operands."""

    node: Node
    """A node of the unchunked graph that calls an operator."""

    outcomes: Mapping[Node, RuleOutcome]
    """The outcome of every node that runs in chunks, and of those that enter the region sharded;
    every other operand is whole."""

    extent: int
    """The size of the dimension that is chunked."""

    partner: Node | None = None
    """The forward node that the node differentiates."""

    keeps_casts: bool = False
    """Whether sums stay behind casts that lose bits."""

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """All arguments by the names that the operator's schema gives them, in its order."""
        return arguments_of(self.node)

    def get(self, name: str) -> Any:
        """An argument by its name; None if the operator has none such."""
        return self.arguments.get(name)

    @property
    def operands(self) -> list[Node]:
        """Every argument that is a node, tensors and numbers, each once, in order."""
        return self.node.all_input_nodes

    @property
    def results(self) -> list[Any]:
        """The unchunked results."""
        value = value_of(self.node)
        return list(value) if isinstance(value, (tuple, list)) else [value]

    @property
    def shapes(self) -> list[tuple[object, ...]]:
        """Shapes of the unchunked results, perhaps with symbolic sizes; numbers have none."""
        return [tuple(getattr(result, "shape", ())) for result in self.results]

    @property
    def ranks(self) -> list[int]:
        """Numbers of dimensions of the results."""
        return [len(shape) for shape in self.shapes]

    def state(self, node: Node) -> State:
        """The state of an operand."""
        state = self.outcomes[node].state if node in self.outcomes else Whole()
        if isinstance(state, tuple):
            raise NotProvenError(f"it reads all results of {node.name} at once")
        return state

    def layout(self, node: Node) -> Layout | None:
        """Where the extent stands in an operand, if it does."""
        return layout_of(self.state(node))

    def shape(self, node: Node) -> tuple[int, ...]:
        """An operand's shape in the unchunked graph. Sizes that depend on data are symbolic."""
        value = value_of(node)
        return tuple(value.shape) if isinstance(value, torch.Tensor) else ()

    def rank(self, node: Node) -> int:
        """Number of dimensions of an operand; none for a number."""
        return len(self.shape(node))

    def must_cut(self, node: Node, layout: Layout) -> bool:
        """Whether a chunk needs its part of a whole operand.

        Not of one that is spread over the dimension. Of other operands each chunk has its part; if
        their layout is not known, their shape shows it when they run.

        Raises:
            NotProvenError: the operand is whole and has no such part, or is sharded in another way.
        """
        size: object = self.shape(node)[layout.dim]
        is_int = isinstance(size, int)
        if is_int and size == 1:
            return False
        state = self.state(node)
        if isinstance(state, Whole) and not (is_int and size == layout.factor * self.extent):
            raise NotProvenError(f"{node.name} has no dimension of the chunked extent to cut")
        if not isinstance(state, Whole) and layout_of(state) not in (layout, None):
            raise NotProvenError(
                f"{node.name} is {describe(state)}, and should be sharded along dim {layout.dim}"
            )
        return isinstance(state, Whole)

    def scaled_arguments(self, layout: Layout | None) -> tuple[Any, ...]:
        """The arguments for a chunk of a result laid out so: one may be the shape of it."""
        if not isinstance(self.node.target, OpOverload):
            return self.node.args  # an operator of operators, which takes no shapes
        arguments: list[Any] = list(self.node.args)
        for position, name in zip(range(len(arguments)), self.arguments, strict=False):
            if layout is None or name not in ("size", "input_sizes"):
                continue
            sizes = arguments[position] = list(arguments[position])
            if isinstance(sizes[layout.dim], int) and sizes[layout.dim] != -1:
                sizes[layout.dim] = Scaled(layout.factor)
        return tuple(arguments)

    def outcome(self, states: list[State], **changes: Any) -> RuleOutcome:
        """An answer with one state for each result."""
        is_many = isinstance(value_of(self.node), (tuple, list))
        return RuleOutcome(state=tuple(states) if is_many else states[0], **changes)


Rule = Callable[[RuleCall], RuleOutcome | State]

RULES: dict[object, Rule] = {}
"""The rule of each operator."""


def rule(*targets: OpOverload | HigherOrderOperator) -> Callable[[Rule], Rule]:
    """Register the rule of operators. Also for operators of other packages.

    Raises:
        ValueError: an operator has a rule already.
    """

    def register(function: Rule) -> Rule:
        for target in targets:
            if target in RULES:
                raise ValueError(f"{target} has a chunk rule already")
            RULES[target] = function
        return function

    return register
