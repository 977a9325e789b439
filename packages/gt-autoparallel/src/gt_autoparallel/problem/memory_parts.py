"""Bytes of a problem's variables, in a row for each moment that may be the fullest.

``prices.memory`` tells what is there when. Bytes are those of all nodes of a class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gt_autoparallel.graph.layer_names import window_scope
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.parameter_chains import is_view_like
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode, Value
from gt_autoparallel.prices.memory import (
    GradientCopies,
    gradient_bytes,
    option_bytes,
    recomputed_bytes,
    unreduced_bytes,
)
from gt_autoparallel.prices.saved_storages import SavedStorages
from gt_autoparallel.problem.choices import Choice, backward_name, first_node, makes_again
from gt_autoparallel.problem.clustering import Clustering
from gt_autoparallel.solver.problem import FloatArray

LOSS_ROW = "loss"
"""Name of the memory row of the moment at which the loss is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Of all problems of one clustering, whatever the budget is."""

    rows: tuple[str, ...]
    """Names of the rows."""

    num_bytes: tuple[tuple[FloatArray, ...], ...]
    """Of each variable, for each row."""

    passing_bytes: Mapping[int, tuple[FloatArray, ...]]
    """As ``Block.passing_bytes``, of each variable, for the rows of kinds of layers."""

    rows_of_window: Mapping[str, tuple[int, ...]]
    """The rows of each kind of layers, by the name of its backward's window."""


Moment = Literal["backward", "reduction", "loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A moment of which bytes are counted: of the backward of a kind of layers, or of the loss."""

    name: str
    moment: Moment
    window: str | None = None
    """Of a kind's backward; None if it is of no kind."""


def _rows_of_window(rows: Sequence[_Row]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for number, row in enumerate(rows):
        if row.window is not None:
            found[row.window] = (*found.get(row.window, ()), number)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBuilder:
    """Makes the rows of one clustering's problems."""

    graph: PlacementGraph
    mesh: MeshShape
    clustering: Clustering
    saved: SavedStorages
    optimizer_state_copies: float
    gradients: GradientCopies
    has_loss: bool
    """Whether the loss takes memory of its own: else the backward is always the fuller moment."""

    gathered: frozenset[int]
    """Nodes that make parameters what they are computed with."""

    reduced: Mapping[Value, int]
    """What becomes a gradient -> bytes of an element when it is reduced; empty if nothing counts
    that is not reduced yet."""

    def parts(self, choices: Sequence[Sequence[Choice]]) -> MemoryParts:
        """The rows of variables with these choices."""
        rows = self._memory_rows(choices)
        passing_bytes = self._passing_bytes(rows, choices)
        return MemoryParts(
            rows=tuple(row.name for row in rows),
            num_bytes=self._memory_bytes(rows, choices, passing_bytes),
            passing_bytes=passing_bytes,
            rows_of_window=_rows_of_window(rows),
        )

    def _memory_rows(self, choices: Sequence[Sequence[Choice]]) -> tuple[_Row, ...]:
        """A row for the backward of each kind of layer that may make something again.

        One if there is none; one for the reduction of each kind's gradients, and one for the loss.
        """
        making: dict[str, None] = {}
        reducing: dict[str, None] = {}
        for number, each in enumerate(choices):
            name = backward_name(self.graph, self.clustering, number)
            if makes_again(each).any():
                making[name] = None
            if self._unreduced_bytes(number, each).any():
                reducing[name] = None
        rows = [_Row(name=name, moment="backward", window=name) for name in making]
        rows = rows or [_Row(name="memory", moment="backward")]
        rows += [
            _Row(name=f"{name}, reduction", moment="reduction", window=name) for name in reducing
        ]
        loss = [_Row(name=LOSS_ROW, moment="loss")] if self.has_loss else []
        return (*rows, *loss)

    def _memory_bytes(
        self,
        rows: Sequence[_Row],
        choices: Sequence[Sequence[Choice]],
        passing_bytes: Mapping[int, Sequence[FloatArray]],
    ) -> tuple[tuple[FloatArray, ...], ...]:
        """For each class and each row [choices]: what is there of the class at that moment."""
        found = []
        for number, each in enumerate(choices):
            size = len(self.clustering.members[number])
            kept = self._kept_bytes(number, each) * size
            gradients = self._gradient_bytes(number, each)
            copies = {"loss": self.gradients.at_loss}
            of_rows = [
                kept + gradients * copies.get(row.moment, self.gradients.in_backward)
                for row in rows
            ]
            for row, passing in passing_bytes.items():
                of_rows[row] = of_rows[row] + passing[number]
            found.append(tuple(of_rows))
        return tuple(found)

    def _passing_bytes(
        self,
        rows: Sequence[_Row],
        choices: Sequence[Sequence[Choice]],
    ) -> dict[int, tuple[FloatArray, ...]]:
        """For each row of a kind, and each class, [choices] bytes that one node has only then.

        Where gradients are reduced these are in flight, and what the layer has saved is gone.
        """
        found: dict[int, tuple[FloatArray, ...]] = {}
        for place, row in enumerate(rows):
            if row.window is None:
                continue
            of_classes = []
            for number, each in enumerate(choices):
                here = backward_name(self.graph, self.clustering, number) == row.window
                if not here:
                    passing = np.zeros(len(each))
                elif row.moment == "backward":
                    passing = self._again_bytes(number, each) + self._ahead_bytes(number, each)
                else:
                    passing = self._unreduced_bytes(number, each) + self._ahead_bytes(number, each)
                    if self._is_let_go(number):
                        passing -= self._kept_bytes(number, each)
                of_classes.append(passing)
            found[place] = tuple(of_classes)
        return found

    def _is_let_go(self, number: int) -> bool:
        """Whether what nodes of a class keep is gone when their layers' backward ends.

        A view that need not move may lie in what another layer made, whose backward is to come.
        """
        nodes = [self.graph.nodes[index] for index in self.clustering.members[number]]
        return all(node.kind != "parameter" and self._keeps_own(node) for node in nodes)

    def _keeps_own(self, node: PlacementNode) -> bool:
        scope, viewed = window_scope(node), node
        while is_view_like(viewed) and window_scope(viewed) == scope:
            source = viewed.operands[0]
            counts = self.saved.counts_while_kept(self.graph, source)
            if counts and "aliased" in self.saved.statuses.get(viewed.index, ()):
                return True  # "moved" is a storage of its own then
            viewed = self.graph.nodes[source.node]
        return window_scope(viewed) == scope

    def _again_bytes(self, number: int, choices: Sequence[Choice]) -> FloatArray:
        """[choices] Bytes that one node of a class makes again in the backward of its layer."""
        node = first_node(self.graph, self.clustering, number)
        made = [
            recomputed_bytes(
                self.graph,
                node,
                choice.option,
                self.mesh,
                keeps_products=choice.status == "products",
            )
            / self.saved.num_graphs
            if again
            else 0.0
            for choice, again in zip(choices, makes_again(choices).tolist(), strict=True)
        ]
        return np.array(made, dtype=np.float64)

    def _ahead_bytes(self, number: int, choices: Sequence[Choice]) -> FloatArray:
        """[choices] Bytes that are gathered ahead of a layer, as many as one node gathers again."""
        if first_node(self.graph, self.clustering, number).index in self.gathered:
            return self._again_bytes(number, choices)
        return np.zeros(len(choices))

    def _unreduced_bytes(self, number: int, choices: Sequence[Choice]) -> FloatArray:
        """[choices] Bytes of gradients that one node makes and that are then reduced."""
        node = first_node(self.graph, self.clustering, number)
        single = [
            unreduced_bytes(self.graph, node, choice.option, self.mesh, reduced=self.reduced)
            for choice in choices
        ]
        return np.array(single, dtype=np.float64)

    def _kept_bytes(self, number: int, choices: Sequence[Choice]) -> FloatArray:
        """[choices] Bytes of one node of a class from the forward on."""
        single = [
            option_bytes(
                self.graph,
                first_node(self.graph, self.clustering, number),
                choice.option,
                self.mesh,
                saved=self.saved,
                status=choice.status,
                optimizer_state_copies=self.optimizer_state_copies,
            )
            for choice in choices
        ]
        return np.array(single, dtype=np.float64)

    def _gradient_bytes(self, number: int, choices: Sequence[Choice]) -> FloatArray:
        """[choices] Bytes of parameters' gradients that all nodes of a class make."""
        node, accumulated = first_node(self.graph, self.clustering, number), self.saved.accumulated
        single = [
            gradient_bytes(self.graph, node, choice.option, self.mesh, accumulated=accumulated)
            for choice in choices
        ]
        return np.array(single, dtype=np.float64) * len(self.clustering.members[number])
