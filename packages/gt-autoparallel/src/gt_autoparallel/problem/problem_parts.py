"""What problems of one clustering have in common: choices of variables, their prices, and edges.

Times are those of one node or use of a class, for windows to multiply, or of all of them where they
count in full; bytes are those of all nodes of a class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gt_autoparallel.graph.layer_names import backward_window, window_scope
from gt_autoparallel.graph.layouts import Layout, MeshShape
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.parameter_chains import ParameterMove, is_view_like
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode, Use, Value
from gt_autoparallel.prices.costs import StepPrices
from gt_autoparallel.prices.memory import (
    GradientCopies,
    gradient_bytes,
    option_bytes,
    recomputed_bytes,
    unreduced_bytes,
)
from gt_autoparallel.prices.saved_storages import SavedStorages, Status
from gt_autoparallel.problem.clustering import Clustering
from gt_autoparallel.problem.redistribution_tables import (
    RedistributionTable,
    RedistributionTables,
)
from gt_autoparallel.solver.problem import Edge, FloatArray, IntArray

OptionsOf = Callable[[PlacementNode], tuple[NodeOption, ...]]
"""The options that a node may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One option of a variable: an option of its nodes, and what becomes of their result."""

    option: NodeOption
    status: Status | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemParts:
    """What problems of one clustering have in common, whatever budget and constraints are."""

    choices: tuple[tuple[Choice, ...], ...]
    compute_us: tuple[FloatArray, ...]
    again_us: tuple[Mapping[int, FloatArray], ...]
    """Of each variable, as ``Variable.further_compute_us``."""

    memory_rows: tuple[str, ...]
    """Names of the rows."""

    memory_bytes: tuple[tuple[FloatArray, ...], ...]
    """Of each variable, for each row."""

    passing_bytes: Mapping[int, tuple[FloatArray, ...]]
    """As ``Block.passing_bytes``, of each variable, for the rows of kinds of layers."""

    rows_of_window: Mapping[str, tuple[int, ...]]
    """The rows of each kind of layers, by the name of its backward's window."""

    edges: tuple[Edge, ...]


PartsKey = tuple[Clustering, bool, bool]
"""A clustering, whether nodes may run again, and whether bytes have a limit."""

LOSS_ROW = "loss"
"""Name of the memory row of the moment at which the loss is computed."""


def problem_parts(
    builder: PartsBuilder, options_of: OptionsOf, optimizer_state_copies: float
) -> ProblemParts:
    """The parts that ``builder`` makes of the options of nodes."""
    choices = builder.choices(options_of)
    rows = builder.memory_rows(choices)
    passing_bytes = builder.passing_bytes(rows, choices, optimizer_state_copies)
    compute_us = tuple(builder.compute_us(*each) for each in enumerate(choices))
    return ProblemParts(
        choices=choices,
        compute_us=compute_us,
        again_us=tuple(
            builder.again_us(number, each, compute_us[number])
            for number, each in enumerate(choices)
        ),
        memory_rows=tuple(row.name for row in rows),
        memory_bytes=builder.memory_bytes(rows, choices, optimizer_state_copies, passing_bytes),
        passing_bytes=passing_bytes,
        rows_of_window=_rows_of_window(rows),
        edges=(*builder.use_edges(choices), *builder.link_edges(choices)),
    )


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
class _Labels:
    """What of each option of a variable matters to others: one of a few layouts and statuses."""

    of_option: IntArray
    distinct: tuple[tuple[Layout, Status | None], ...]
    """A layout, and the status of the node if it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsBuilder:
    """Makes the parts of one clustering's problems."""

    graph: PlacementGraph
    mesh: MeshShape
    prices: StepPrices
    clustering: Clustering
    saved: SavedStorages
    unshards: frozenset[int]
    reduces: frozenset[int]
    summed_later: frozenset[int]
    tables: RedistributionTables
    times: dict[int, FloatArray]
    """Of first nodes of classes of earlier problems [options]: times; gets further ones."""

    forward_of: Mapping[int, int]
    """From the backward of routed experts to its forward."""

    gradients: GradientCopies
    has_loss: bool
    """Whether the loss takes memory of its own: else the backward is always the fuller moment."""

    gathered: frozenset[int]
    """Nodes that make parameters what they are computed with."""

    reduced: Mapping[Value, int]
    """What becomes a gradient -> bytes of an element when it is reduced; empty if nothing counts
    that is not reduced yet."""

    def choices(self, options_of: OptionsOf) -> tuple[tuple[Choice, ...], ...]:
        """For each class its nodes' options, with what may become of the results."""
        result = []
        for members in self.clustering.members:
            node = self.graph.nodes[members[0]]
            options = options_of(node)
            statuses = self._statuses(node)
            result.append(
                tuple(Choice(option=o, status=status) for o in options for status in statuses)
            )
        return tuple(result)

    def compute_us(self, number: int, choices: Sequence[Choice]) -> FloatArray:
        """[choices] Time of one node of a class, with that of the forward that it repeats."""
        node = self._first(number)
        operands = self.graph.operand_specs(node)
        num_statuses = len(self._statuses(node))
        if node.index not in self.times:
            self.times[node.index] = np.array(
                [
                    self.prices.compute_us(node, operands, choice.option, self.mesh)
                    for choice in choices[::num_statuses]
                ],
                dtype=np.float64,
            )
        times: FloatArray = np.repeat(self.times[node.index], num_statuses)
        if node.index in self.forward_of:
            times += [self._repeated_us(node, choice) for choice in choices]
        return times

    def _repeated_us(self, node: PlacementNode, choice: Choice) -> float:
        """What the backward of routed experts computes of their forward."""
        operands = self.graph.operand_specs(node)
        if choice.status == "products":
            return self.prices.between_products_us(node, operands, choice.option, self.mesh)
        if choice.status != "repeated":
            return 0.0
        forward = self.graph.nodes[self.forward_of[node.index]]
        option = replace(choice.option, operands=choice.option.operands[1:])
        operands = self.graph.operand_specs(forward)
        return self.prices.compute_us(forward, operands, option, self.mesh)

    def _statuses(self, node: PlacementNode) -> tuple[Status | None, ...]:
        return self.saved.statuses.get(node.index, (None,))

    def again_us(
        self, number: int, choices: Sequence[Choice], compute_us: FloatArray
    ) -> dict[int, FloatArray]:
        """The window in which a node of a class runs again -> [choices] its time there."""
        again = _runs_again(choices)
        if not again.any():
            return {}
        times = np.where(again, compute_us, 0.0)
        return {self._backward_window(number): times} if times.any() else {}

    def memory_rows(self, choices: Sequence[Sequence[Choice]]) -> tuple[_Row, ...]:
        """A row for the backward of each kind of layer that may make something again.

        One if there is none; one for the reduction of each kind's gradients, and one for the loss.
        """
        making: dict[str, None] = {}
        reducing: dict[str, None] = {}
        for number, each in enumerate(choices):
            name = self._backward_name(number)
            if _makes_again(each).any():
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

    def memory_bytes(
        self,
        rows: Sequence[_Row],
        choices: Sequence[Sequence[Choice]],
        optimizer_state_copies: float,
        passing_bytes: Mapping[int, Sequence[FloatArray]],
    ) -> tuple[tuple[FloatArray, ...], ...]:
        """For each class and each row [choices]: what is there of the class at that moment."""
        found = []
        for number, each in enumerate(choices):
            size = len(self.clustering.members[number])
            kept = self._kept_bytes(number, each, optimizer_state_copies) * size
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

    def passing_bytes(
        self,
        rows: Sequence[_Row],
        choices: Sequence[Sequence[Choice]],
        optimizer_state_copies: float,
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
                here = self._backward_name(number) == row.window
                if not here:
                    passing = np.zeros(len(each))
                elif row.moment == "backward":
                    passing = self._again_bytes(number, each) + self._ahead_bytes(number, each)
                else:
                    passing = self._unreduced_bytes(number, each) + self._ahead_bytes(number, each)
                    if self._is_let_go(number):
                        passing -= self._kept_bytes(number, each, optimizer_state_copies)
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
            if counts and "aliased" in self._statuses(viewed):
                return True  # "moved" is a storage of its own then
            viewed = self.graph.nodes[source.node]
        return window_scope(viewed) == scope

    def _again_bytes(self, number: int, choices: Sequence[Choice]) -> FloatArray:
        """[choices] Bytes that one node of a class makes again in the backward of its layer."""
        node = self._first(number)
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
            for choice, again in zip(choices, _makes_again(choices).tolist(), strict=True)
        ]
        return np.array(made, dtype=np.float64)

    def _ahead_bytes(self, number: int, choices: Sequence[Choice]) -> FloatArray:
        """[choices] Bytes that are gathered ahead of a layer, as many as one node gathers again."""
        if self._first(number).index in self.gathered:
            return self._again_bytes(number, choices)
        return np.zeros(len(choices))

    def _unreduced_bytes(self, number: int, choices: Sequence[Choice]) -> FloatArray:
        """[choices] Bytes of gradients that one node makes and that are then reduced."""
        node = self._first(number)
        single = [
            unreduced_bytes(self.graph, node, choice.option, self.mesh, reduced=self.reduced)
            for choice in choices
        ]
        return np.array(single, dtype=np.float64)

    def _backward_window(self, number: int) -> int:
        return self.clustering.window_names.index(self._backward_name(number))

    def _backward_name(self, number: int) -> str:
        node = self._first(number)
        if node.phase == "backward":
            return self.clustering.window_names[self.clustering.window_of_class[number]]
        return backward_window(node)

    def _kept_bytes(
        self, number: int, choices: Sequence[Choice], optimizer_state_copies: float
    ) -> FloatArray:
        """[choices] Bytes of one node of a class from the forward on."""
        single = [
            option_bytes(
                self.graph,
                self._first(number),
                choice.option,
                self.mesh,
                saved=self.saved,
                status=choice.status,
                optimizer_state_copies=optimizer_state_copies,
            )
            for choice in choices
        ]
        return np.array(single, dtype=np.float64)

    def _gradient_bytes(self, number: int, choices: Sequence[Choice]) -> FloatArray:
        """[choices] Bytes of parameters' gradients that all nodes of a class make."""
        node, accumulated = self._first(number), self.saved.accumulated
        single = [
            gradient_bytes(self.graph, node, choice.option, self.mesh, accumulated=accumulated)
            for choice in choices
        ]
        return np.array(single, dtype=np.float64) * len(self.clustering.members[number])

    def _first(self, number: int) -> PlacementNode:
        return self.graph.nodes[self.clustering.members[number][0]]

    def use_edges(self, choices: Sequence[Sequence[Choice]]) -> list[Edge]:
        """One edge for all uses of the same place in alike nodes by the same place in others."""
        class_of = self.clustering.class_of_node
        first_use: dict[tuple[int, int, int, int], Use] = {}
        counts: Counter[tuple[int, int, int, int]] = Counter()
        for use in self.graph.uses():
            value = use.value
            key = (class_of[value.node], value.output, class_of[use.consumer], use.position)
            first_use.setdefault(key, use)
            counts[key] += 1
        labels: dict[tuple[int, bool, int], _Labels] = {}

        def labelled(variable: int, is_output: bool, position: int) -> _Labels:
            key = (variable, is_output, position)
            if key not in labels:
                value = Value(self._first(variable).index, position)
                counts = is_output and self.saved.counts_while_kept(self.graph, value)
                labels[key] = _labels(choices[variable], is_output, position, counts=counts)
            return labels[key]

        edges = []
        for (left, output, right, position), use in first_use.items():
            source, target = labelled(left, True, output), labelled(right, False, position)
            move = self._move(use)
            times = self._use_times(use, source, target, move)
            again = np.array([status == "recomputed" for _, status in target.distinct])
            in_full_again_us = np.where(again & np.isfinite(times.in_full_us), times.in_full_us, 0)
            hidden_again_us = np.where(again, times.hidden_us, 0.0)
            consumer = self.graph.nodes[use.consumer]
            count = counts[left, output, right, position]
            window = None if move is None else self.clustering.window_of_class[right]
            if window is not None:
                assert count == self.clustering.window_sizes[window], "alike layers have alike uses"
            name = f"{self.graph.nodes[use.value.node].name} -> {consumer.name}[{position}]"
            edge = Edge(
                name=name,
                left=left,
                right=right,
                left_labels=source.of_option,
                right_labels=target.of_option,
                cost_us=(times.in_full_us + in_full_again_us) * count,
                window=window,
                window_communication_us=times.hidden_us,
            )
            edges.append(edge)
            if hidden_again_us.any():
                edges.append(
                    replace(
                        edge,
                        name=f"{name} again",
                        cost_us=np.where(np.isinf(times.in_full_us), np.inf, 0.0),
                        window=self._backward_window(right),
                        window_communication_us=hidden_again_us,
                    )
                )
        return edges

    def _move(self, use: Use) -> ParameterMove | None:
        if use.value.node in self.unshards:
            return "unshard"
        return "reduce_grad" if use.consumer in self.reduces else None

    def _use_times(
        self, use: Use, source: _Labels, target: _Labels, move: ParameterMove | None
    ) -> RedistributionTable:
        """By labels: times of the steps, inf in full for what may not be."""
        sources = tuple(dict.fromkeys(layout for layout, _ in source.distinct))
        targets = tuple(dict.fromkeys(layout for layout, _ in target.distinct))
        table = self.tables.table(self.graph.spec(use.value), sources, targets, move)
        row_of = {layout: row for row, layout in enumerate(sources)}
        column_of = {layout: column for column, layout in enumerate(targets)}
        rows = [row_of[layout] for layout, _ in source.distinct]
        columns = [column_of[layout] for layout, _ in target.distinct]
        grid = np.ix_(rows, columns)
        times: FloatArray = table.in_full_us[grid]
        if use.consumer in self.summed_later:
            times = np.where(_equal_layouts(source, target), times, np.inf)
        counts = self.saved.counts_while_kept(self.graph, use.value)
        needed = np.array(
            [
                status != "idle" if counts else status == "recomputed"
                for _, status in source.distinct
            ]
        )
        aliased = np.array([status == "aliased" for _, status in target.distinct])
        if aliased.any():
            stays = _equal_layouts(source, target)
            times = np.where(aliased[None, :] & ~(stays & needed[:, None]), np.inf, times)
            # What stays is in the storage below, of which it may be a small part.
            moved = np.array([status in ("moved", "recomputed") for _, status in target.distinct])
            below = stays if counts else stays & needed[:, None]
            times = np.where(moved[None, :] & below, np.inf, times)
        again = np.array([status == "recomputed" for _, status in target.distinct])
        if again.any():
            times = np.where(again[None, :] & ~needed[:, None], np.inf, times)
        return RedistributionTable(in_full_us=times, hidden_us=table.hidden_us[grid])

    def link_edges(self, choices: Sequence[Sequence[Choice]]) -> list[Edge]:
        """Pairs of variables that must have the same layouts: cost 0 if they do, else inf."""
        edges: dict[tuple[int, int], Edge] = {}
        for left, right in self._linked_nodes():
            pair = (self.clustering.class_of_node[left], self.clustering.class_of_node[right])
            if pair not in edges:
                edges[pair] = self._link(left, right, choices)
        return list(edges.values())

    def _linked_nodes(self) -> list[tuple[int, int]]:
        """Parameter or input and gradient, output and tangent, experts forward and backward."""
        parameters = {str(n.target): n.index for n in self.graph.of_kind("parameter")}
        outputs = {f"{n.target}/tangent": n.index for n in self.graph.of_kind("output")}
        links = [(parameters[str(n.target)], n.index) for n in self.graph.of_kind("gradient")]
        inputs = {str(n.target): n.index for n in self.graph.of_kind("input")}
        links += [(inputs[str(n.target)], n.index) for n in self.graph.of_kind("input_gradient")]
        links += [(outputs[str(n.target)], n.index) for n in self.graph.of_kind("tangent")]
        forward: dict[str, int] = {}
        for node in self.graph.of_kind("experts"):
            if node.phase == "forward":
                forward[str(node.target)] = node.index
            elif str(node.target) in forward:
                links.append((forward[str(node.target)], node.index))
        return links

    def _link(self, left: int, right: int, choices: Sequence[Sequence[Choice]]) -> Edge:
        class_of = self.clustering.class_of_node
        first, second = self.graph.nodes[left], self.graph.nodes[right]
        of_left = [_linked_layouts(first, c.option) for c in choices[class_of[left]]]
        of_right = [_linked_layouts(second, c.option) for c in choices[class_of[right]]]
        return equality_edge(
            f"{first.name} = {second.name}", class_of[left], class_of[right], of_left, of_right
        )


def equality_edge(
    name: str, left: int, right: int, of_left: Sequence[Hashable], of_right: Sequence[Hashable]
) -> Edge:
    """Allows two variables only options of which the same is said: it costs nothing, else inf.

    ``of_left`` and ``of_right`` are what is said of each option of the variables.
    """
    number = {key: i for i, key in enumerate(dict.fromkeys([*of_left, *of_right]))}
    cost = np.full((len(number), len(number)), np.inf)
    np.fill_diagonal(cost, 0.0)
    return Edge(
        name=name,
        left=left,
        right=right,
        left_labels=np.array([number[key] for key in of_left], dtype=np.int64),
        right_labels=np.array([number[key] for key in of_right], dtype=np.int64),
        cost_us=cost,
        window=None,
        window_communication_us=np.zeros(cost.shape),
    )


def _runs_again(choices: Sequence[Choice]) -> NDArray[np.bool_]:
    """[choices] Whether nodes of a class run again."""
    return np.array([choice.status == "recomputed" for choice in choices])


def _makes_again(choices: Sequence[Choice]) -> NDArray[np.bool_]:
    """[choices] Whether memory has in the backward what nodes of a class make again there."""
    again = ("recomputed", "products", "repeated")
    return np.array([choice.status in again for choice in choices])


def _linked_layouts(node: PlacementNode, option: NodeOption) -> Hashable:
    if node.kind == "experts":
        return option.operands[1:] if node.phase == "backward" else option.operands
    return option.outputs[0] if option.outputs else option.operands[0]


def _labels(choices: Sequence[Choice], is_output: bool, position: int, *, counts: bool) -> _Labels:
    """Of an output, ``counts`` says whether its bytes do while its node is kept."""
    number: dict[tuple[Layout, Status | None], int] = {}
    of_option = []
    offered = {choice.status for choice in choices}
    # What a consumer may ask of a producer is whether its storage is there, and the other way round
    # whether it runs again, and whether it is moved or aliased, if it may be either.
    matters: tuple[Status, ...] = ("recomputed",)
    if is_output:
        matters = ("idle",) if counts else ("recomputed",)
    elif position == 0 and "aliased" in offered:
        matters = ("moved", "aliased", "recomputed")
    for choice in choices:
        layout = (choice.option.outputs if is_output else choice.option.operands)[position]
        assert layout is not None, "a value is a tensor"
        status = choice.status if choice.status in matters else None
        of_option.append(number.setdefault((layout, status), len(number)))
    return _Labels(of_option=np.array(of_option, dtype=np.int64), distinct=tuple(number))


def _equal_layouts(source: _Labels, target: _Labels) -> NDArray[np.bool_]:
    """[source labels, target labels] Whether both have the same layout."""
    number: dict[Layout, int] = {}
    left, right = (
        np.array([number.setdefault(layout, len(number)) for layout, _ in labels.distinct])
        for labels in (source, target)
    )
    equal: NDArray[np.bool_] = left[:, None] == right[None, :]
    return equal
