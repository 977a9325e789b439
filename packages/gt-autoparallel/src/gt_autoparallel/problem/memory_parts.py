"""Bytes of a problem's variables, in a row for each moment that may be the fullest.

``prices.memory`` tells what is there when. Bytes are those of all nodes of a class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from gt_autoparallel.graph.layer_names import layer_of_module, window_scope
from gt_autoparallel.graph.layer_turns import LayerTurns
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.parameter_chains import is_view_like
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode, Value
from gt_autoparallel.prices.memory import GradientCopies
from gt_autoparallel.prices.node_memory import (
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

    given_back: tuple[FloatArray, ...]
    """Of each variable [options]: what one node has saved and lets go of, less the gradients that
    come: so many bytes more are there before its layer's backward than after it."""


Moments = Literal["everything", "usual", "all"]
"""Which moments of the backward have rows. Everything: one at which all that is saved and all
gradients count. Usual: those with all that is saved, and of layers' gradients the own ones. All:
also the turns of layers, of which the first may be fuller where gradients are more than what is
saved, and reductions."""


Moment = Literal["backward", "reduction", "loss"]
Counted = Literal["everything", "saved", "first", "last"]
"""What counts at a moment of the backward: everything; all that is saved, and of gradients none but
the layer's own; or what is there in the turn of a kind's first layer, or of its last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A moment of which bytes are counted: of the backward of a kind of layers, or of the loss."""

    name: str
    moment: Moment
    window: str | None = None
    """Of a kind's backward; None if it is of no kind."""

    counted: Counted = "everything"


def _rows_of_window(rows: Sequence[_Row]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for number, row in enumerate(rows):
        if row.window is not None:
            found[row.window] = (*found.get(row.window, ()), number)
    return found


def _counted_turns(places: Mapping[str, tuple[int, int]], window: str) -> tuple[Counted, ...]:
    """The turns of a kind of layers that may be fuller than any moment with all that is saved.

    That of the very last layer is not.
    """
    first, last = places[window]
    is_last = last == max(end for _, end in places.values())
    if first == last:
        return () if is_last else ("first",)
    return ("first",) if is_last else ("first", "last")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClassBytes:
    """[choices] Bytes of one node of a class."""

    window: str
    """Of the backward of its layers."""

    size: int
    """How many nodes there are."""

    kept: FloatArray
    """From the forward on."""

    let_go: FloatArray
    """Of that, what is gone when its layer's backward ends."""

    again: FloatArray
    ahead: FloatArray
    unreduced: FloatArray
    """Zeros where nothing counts at reductions."""

    gradients: FloatArray
    to_come: FloatArray
    """Of these, what comes in its layer's turn."""


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
    """What becomes a gradient -> bytes of an element when it is reduced."""

    moments: Moments
    turns: LayerTurns
    read_late: frozenset[int]
    """Nodes that may be read after the end of their layer's backward."""

    def parts(self, choices: Sequence[Sequence[Choice]]) -> MemoryParts:
        """The rows of variables with these choices."""
        of_classes = [self._class_bytes(number, each) for number, each in enumerate(choices)]
        places = self._places()
        rows = self._memory_rows(choices, of_classes, places)
        passing_bytes = {
            place: tuple(self._passing_bytes(row, each) for each in of_classes)
            for place, row in enumerate(rows)
            if row.window is not None
        }
        num_bytes = tuple(
            tuple(
                self._lasting_bytes(row, each, places)
                + (passing_bytes[place][number] if place in passing_bytes else 0.0)
                for place, row in enumerate(rows)
            )
            for number, each in enumerate(of_classes)
        )
        return MemoryParts(
            rows=tuple(row.name for row in rows),
            num_bytes=num_bytes,
            passing_bytes=passing_bytes,
            rows_of_window=_rows_of_window(rows),
            given_back=tuple(each.let_go - each.to_come for each in of_classes),
        )

    def _memory_rows(
        self,
        choices: Sequence[Sequence[Choice]],
        of_classes: Sequence[_ClassBytes],
        places: Mapping[str, tuple[int, int]],
    ) -> tuple[_Row, ...]:
        """Rows for moments of the backward of each kind of layers, and one for the loss."""
        making = {
            of_class.window
            for each, of_class in zip(choices, of_classes, strict=True)
            if makes_again(each).any()
        }
        reducing = {each.window for each in of_classes if each.unreduced.any()}
        takes_turns = {} if self.moments == "everything" else places
        rows: list[_Row] = []
        at_reductions: list[_Row] = []
        for name in dict.fromkeys(each.window for each in of_classes):
            counted: Counted = "saved" if name in takes_turns else "everything"
            row = _Row(name=name, moment="backward", window=name, counted=counted)
            has_turns = name in takes_turns and self.moments == "all"
            further = [
                replace(row, name=f"{name}, {turn} layer", counted=turn)
                for turn in (_counted_turns(places, name) if has_turns else ())
            ]
            if name in takes_turns or name in making:
                rows += [row, *further]
            if name in reducing:
                at_reductions += [
                    replace(each, name=f"{each.name}, reduction", moment="reduction")
                    for each in (row, *further)
                ]
        rows = rows or [_Row(name="memory", moment="backward")]
        loss = [_Row(name=LOSS_ROW, moment="loss")] if self.has_loss else []
        return (*rows, *at_reductions, *loss)

    def _places(self) -> dict[str, tuple[int, int]]:
        """The first and the last place of each kind of layers, by its backward's window.

        Places are of layers that take turns, and kinds whose layers take none are not there.
        """
        place_of = {layer: place for place, layer in enumerate(self.turns.layers)}
        found: dict[str, tuple[int, int]] = {}
        for number, members in enumerate(self.clustering.members):
            layers = [layer_of_module(self.graph.nodes[index].module) for index in members]
            places = [place_of[layer] for layer in layers if layer in place_of]
            if places:
                name = backward_name(self.graph, self.clustering, number)
                first, last = found.get(name, (places[0], places[0]))
                found[name] = (min(first, *places), max(last, *places))
        return found

    def _lasting_bytes(
        self, row: _Row, of_class: _ClassBytes, places: Mapping[str, tuple[int, int]]
    ) -> FloatArray:
        """[choices] What all nodes of a class have at a moment, but for ``_passing_bytes``."""
        kept, let_go, size = of_class.kept, of_class.let_go, of_class.size
        gradients = of_class.gradients * size
        if row.moment == "loss":
            return kept * size + gradients * self.gradients.at_loss
        everything: FloatArray = kept * size + gradients * self.gradients.in_backward
        if row.counted == "everything" or of_class.window not in places:
            return everything
        assert row.window is not None, "it is of a kind of layers"
        is_gone, is_to_come = row.counted != "saved", True
        if of_class.window == row.window:
            is_gone, is_to_come = row.counted == "first", row.counted != "first"
        elif row.counted != "saved":
            (first, last), (from_, to) = places[row.window], places[of_class.window]
            is_gone, is_to_come = from_ > last, to < first
        lasting = everything
        if is_gone:
            lasting = lasting - let_go * size
        if is_to_come:
            lasting = lasting - of_class.to_come * size
        return lasting

    def _passing_bytes(self, row: _Row, of_class: _ClassBytes) -> FloatArray:
        """[choices] What one node has at the moment of a row only while its layer is at work.

        Where gradients are reduced these are in flight, and what the layer has saved is gone.
        """
        if of_class.window != row.window:
            return np.zeros(len(of_class.kept))
        if row.moment == "backward":
            passing = of_class.again + of_class.ahead
        else:
            passing = of_class.unreduced + of_class.ahead - of_class.let_go
        if row.counted == "first":
            return passing + of_class.let_go
        return passing if row.counted == "everything" else passing + of_class.to_come

    def _class_bytes(self, number: int, choices: Sequence[Choice]) -> _ClassBytes:
        kept, nothing = self._kept_bytes(number, choices), np.zeros(len(choices))
        gradients = self._gradient_bytes(number, choices)
        comes_in_turn = {*self.clustering.members[number]} <= self.turns.gradients.keys()
        return _ClassBytes(
            window=backward_name(self.graph, self.clustering, number),
            size=len(self.clustering.members[number]),
            kept=kept,
            let_go=kept if self._is_let_go(number) else nothing,
            again=self._again_bytes(number, choices),
            ahead=self._ahead_bytes(number, choices),
            unreduced=(
                self._unreduced_bytes(number, choices) if self.moments == "all" else nothing
            ),
            gradients=gradients,
            to_come=gradients if comes_in_turn else nothing,
        )

    def _is_let_go(self, number: int) -> bool:
        """Whether what nodes of a class keep is gone when their layers' backward ends.

        A view that need not move may lie in what another layer made, whose backward is to come.
        """
        members = self.clustering.members[number]
        if not self.read_late.isdisjoint(members):
            return False
        nodes = [self.graph.nodes[index] for index in members]
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
        """[choices] Bytes of parameters' gradients that one node of a class makes."""
        node, accumulated = first_node(self.graph, self.clustering, number), self.saved.accumulated
        single = [
            gradient_bytes(self.graph, node, choice.option, self.mesh, accumulated=accumulated)
            for choice in choices
        ]
        return np.array(single, dtype=np.float64)
