"""What problems of one clustering have in common: choices of variables, their prices, and edges.

Times are those of one node or use of a class, for windows to multiply, or of all of them where they
count in full. Bytes are in ``memory_parts``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gt_autoparallel.graph.layouts import Layout, MeshShape
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.parameter_chains import ParameterMove
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode, Use, Value
from gt_autoparallel.prices.costs import StepPrices
from gt_autoparallel.prices.saved_storages import SavedStorages, Status
from gt_autoparallel.problem.choices import Choice, backward_name, first_node, runs_again
from gt_autoparallel.problem.clustering import Clustering
from gt_autoparallel.problem.memory_parts import MemoryBuilder, MemoryParts, Moments
from gt_autoparallel.problem.redistribution_tables import (
    RedistributionTable,
    RedistributionTables,
)
from gt_autoparallel.solver.problem import Edge, FloatArray, IntArray

OptionsOf = Callable[[PlacementNode], tuple[NodeOption, ...]]
"""The options that a node may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemParts:
    """What problems of one clustering have in common, whatever budget and constraints are."""

    choices: tuple[tuple[Choice, ...], ...]
    compute_us: tuple[FloatArray, ...]
    again_us: tuple[Mapping[int, FloatArray], ...]
    """Of each variable, as ``Variable.further_compute_us``."""

    memory: MemoryParts
    edges: tuple[Edge, ...]


PartsKey = tuple[Clustering, bool, Moments]
"""A clustering, whether nodes may run again, and at which moments bytes count."""


def problem_parts(
    builder: PartsBuilder, memory: MemoryBuilder, options_of: OptionsOf
) -> ProblemParts:
    """The parts that ``builder`` and ``memory`` make of the options of nodes."""
    choices = builder.choices(options_of)
    compute_us = tuple(builder.compute_us(*each) for each in enumerate(choices))
    return ProblemParts(
        choices=choices,
        compute_us=compute_us,
        again_us=tuple(
            builder.again_us(number, each, compute_us[number])
            for number, each in enumerate(choices)
        ),
        memory=memory.parts(choices),
        edges=(*builder.use_edges(choices), *builder.link_edges(choices)),
    )


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
        again = runs_again(choices)
        if not again.any():
            return {}
        times = np.where(again, compute_us, 0.0)
        return {self._backward_window(number): times} if times.any() else {}

    def _backward_window(self, number: int) -> int:
        name = backward_name(self.graph, self.clustering, number)
        return self.clustering.window_names.index(name)

    def _first(self, number: int) -> PlacementNode:
        return first_node(self.graph, self.clustering, number)

    def use_edges(self, choices: Sequence[Sequence[Choice]]) -> list[Edge]:
        """One edge for all uses of the same place in alike nodes by the same place in others."""
        class_of = self.clustering.class_of_node
        first_use: dict[tuple[int, int, int, int], Use] = {}
        counts: Counter[tuple[int, int, int, int]] = Counter()
        for use in self.graph.uses:
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
