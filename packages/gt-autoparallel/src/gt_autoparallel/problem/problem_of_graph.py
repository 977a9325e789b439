"""From a graph and prices to the optimization problem, and from its solution back to options.

    variable   a class of nodes (``clustering``): the options of one, for all of them
    window     a layer, or a top-level module outside of layers, in one phase
    edge       a use: from the layout that leaves the producer to the one that the consumer wants,
               with the price of the steps between them, as often as the use occurs
    link       a gradient has its parameter's layout, a tangent its output's; the backward of routed
               experts runs as their forward

Parameters' and gradients' own redistributions (``parameter_chains``) go to their windows'
communication, all others count in full. A gradient is not redistributed on its way into a cast: its
sum over ranks is done in the dtype that was asked for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch.distributed.tensor import Placement

from gt_autoparallel.graph.layer_names import layer_of_module
from gt_autoparallel.graph.layouts import Layout, MeshShape
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.parameter_chains import gradient_chains, is_cast, parameter_chains
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode, Use
from gt_autoparallel.prices.costs import StepPrices
from gt_autoparallel.prices.memory import option_bytes
from gt_autoparallel.prices.saved_storages import SavedStorages, Status, saved_storages
from gt_autoparallel.problem.clustering import Clustering, cluster_layers
from gt_autoparallel.problem.constraints import LayoutConstraint
from gt_autoparallel.problem.redistribution_tables import RedistributionTables
from gt_autoparallel.rules.experts import expert_options
from gt_autoparallel.solver.problem import (
    Edge,
    FloatArray,
    IntArray,
    MemoryRow,
    Problem,
    Variable,
    Window,
)

OptionsOf = Callable[[PlacementNode], tuple[NodeOption, ...]]
"""The options that a node may take."""

Demand = tuple[str, int, tuple[Placement | None, ...]]
"""A layout constraint without its node: side, position, and a placement or None for each axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """One option of a variable: an option of its nodes, and whose storage their result is in."""

    option: NodeOption
    status: Status | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementProblem:
    """The problem of a graph, and how to read its solution."""

    problem: Problem
    graph: PlacementGraph
    clustering: Clustering
    choices: tuple[tuple[_Choice, ...], ...]
    """What each option of each variable means."""

    def options_of_nodes(self, solution: Sequence[int]) -> tuple[NodeOption, ...]:
        """The option of each node under a choice for each variable."""
        return tuple(
            self.choices[variable][solution[variable]].option
            for variable in self.clustering.class_of_node
        )

    def solution_of(self, options: Sequence[NodeOption]) -> tuple[int, ...]:
        """A choice for each variable that means ``options``, those of the classes' first nodes.

        Of several statuses it takes the first, which may count memory that another need not.

        Raises:
            KeyError: a node cannot take its option.
        """
        found = []
        for choices, members in zip(self.choices, self.clustering.members, strict=True):
            wanted = options[members[0]]
            position = next((i for i, c in enumerate(choices) if c.option == wanted), None)
            if position is None:
                raise KeyError(f"{self.graph.nodes[members[0]].name} has no option {wanted}")
            found.append(position)
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemParts:
    """What problems of one clustering have in common, whatever budget and constraints are."""

    choices: tuple[tuple[_Choice, ...], ...]
    compute_us: tuple[FloatArray, ...]
    memory_bytes: tuple[FloatArray, ...]
    edges: tuple[Edge, ...]


def placement_problem(
    graph: PlacementGraph,
    mesh: MeshShape,
    options_of: OptionsOf,
    prices: StepPrices,
    *,
    memory_budget_bytes: float | None = None,
    optimizer_state_copies: float = 2.0,
    constraints: Sequence[LayoutConstraint] = (),
    tables: RedistributionTables | None = None,
    parts: dict[Clustering, ProblemParts] | None = None,
) -> PlacementProblem:
    """The problem whose solution is the best placement of ``graph``.

    ``options_of`` gives alike nodes the same options. Options that break a constraint are
    forbidden, and a node with constraints shares its choice only with alike nodes that have the
    same ones. ``tables`` and ``parts`` are of earlier problems of the same graph, mesh and prices;
    they get what is made anew.
    """
    of_node: dict[str, tuple[Demand, ...]] = {}
    for each in constraints:
        demand = (each.side, each.position, each.placements)
        of_node[each.node] = (*of_node.get(each.node, ()), demand)
    saved = saved_storages(graph)
    unshards, reduces = parameter_chains(graph), gradient_chains(graph)
    # What alike nodes must have in common besides themselves.
    described: dict[int, Hashable] = {
        node.index: (
            of_node.get(node.name),
            saved.description(node),
            node.index in unshards,
            node.index in reduces,
            tuple(
                _origin(graph, node, value.node)
                for value in node.operands
                if value.node in unshards or node.index in reduces
            ),
        )
        for node in graph.nodes
    }
    clustering = cluster_layers(graph, distinguished=described)
    known = {} if parts is None else parts
    if clustering not in known:
        known[clustering] = _parts(
            _Builder(
                graph=graph,
                mesh=mesh,
                prices=prices,
                clustering=clustering,
                saved=saved,
                unshards=frozenset(unshards),
                reduces=frozenset(reduces),
                tables=RedistributionTables(mesh, prices) if tables is None else tables,
            ),
            options_of,
            optimizer_state_copies,
        )
    found = known[clustering]
    # Without a limit, bytes still decide between plans of equal cost.
    budget = math.inf if memory_budget_bytes is None else memory_budget_bytes
    variables = []
    for number, choices in enumerate(found.choices):
        node = graph.nodes[clustering.members[number][0]]
        demands = of_node.get(node.name, ())
        allowed = [is_allowed(choice.option, demands) for choice in choices]
        variables.append(
            Variable(
                name=node.name,
                cost_us=np.where(allowed, 0.0, np.inf),
                window=clustering.window_of_class[number],
                window_compute_us=found.compute_us[number],
                memory_bytes=(found.memory_bytes[number],),
            )
        )
    problem = Problem(
        variables=tuple(variables),
        edges=found.edges,
        windows=tuple(
            Window(name=name, multiplicity=size)
            for name, size in zip(clustering.window_names, clustering.window_sizes, strict=True)
        ),
        memory=(MemoryRow(name="memory", budget_bytes=budget, fixed_bytes=0.0),),
    )
    return PlacementProblem(
        problem=problem, graph=graph, clustering=clustering, choices=found.choices
    )


def is_allowed(option: NodeOption, demands: Sequence[Demand]) -> bool:
    """Whether an option lies as every demand on its node says."""
    for side, position, placements in demands:
        layout = (option.operands if side == "operand" else option.outputs)[position]
        if layout is None or any(
            wanted is not None and wanted != there
            for wanted, there in zip(placements, layout, strict=True)
        ):
            return False
    return True


def _parts(builder: _Builder, options_of: OptionsOf, optimizer_state_copies: float) -> ProblemParts:
    choices = builder.choices(options_of)
    return ProblemParts(
        choices=choices,
        compute_us=tuple(builder.compute_us(*each) for each in enumerate(choices)),
        memory_bytes=tuple(
            builder.memory_bytes(*each, optimizer_state_copies) for each in enumerate(choices)
        ),
        edges=(*builder.use_edges(choices), *builder.link_edges(choices)),
    )


def _origin(graph: PlacementGraph, node: PlacementNode, producer: int) -> str | None:
    """Where from a window's communication comes: None for the node's own layer, else the name.

    Nodes of alike layers share windows, so their communication must come from alike nodes.
    """
    source = graph.nodes[producer]
    same = layer_of_module(source.module) == layer_of_module(node.module)
    return None if same else source.name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Labels:
    """What of each option of a variable matters to others: one of a few layouts and statuses."""

    of_option: IntArray
    distinct: tuple[tuple[Layout, Status | None], ...]
    """A layout, and the status of the node if it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Builder:
    graph: PlacementGraph
    mesh: MeshShape
    prices: StepPrices
    clustering: Clustering
    saved: SavedStorages
    unshards: frozenset[int]
    reduces: frozenset[int]
    tables: RedistributionTables

    def choices(self, options_of: OptionsOf) -> tuple[tuple[_Choice, ...], ...]:
        result = []
        for members in self.clustering.members:
            node = self.graph.nodes[members[0]]
            options = (
                expert_options(node, self.graph.operand_specs(node), self.mesh)
                if node.kind == "experts"
                else options_of(node)
            )
            statuses = self.saved.statuses.get(node.index, (None,))
            result.append(
                tuple(_Choice(option=o, status=status) for o in options for status in statuses)
            )
        return tuple(result)

    def compute_us(self, number: int, choices: Sequence[_Choice]) -> FloatArray:
        """[choices] Time of one node of a class."""
        node = self._first(number)
        operands = self.graph.operand_specs(node)
        times = [self.prices.compute_us(node, operands, c.option, self.mesh) for c in choices]
        return np.array(times, dtype=np.float64)

    def memory_bytes(
        self, number: int, choices: Sequence[_Choice], optimizer_state_copies: float
    ) -> FloatArray:
        """[choices] Bytes of all nodes of a class."""
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
        return np.array(single, dtype=np.float64) * len(self.clustering.members[number])

    def _first(self, number: int) -> PlacementNode:
        return self.graph.nodes[self.clustering.members[number][0]]

    def use_edges(self, choices: Sequence[Sequence[_Choice]]) -> list[Edge]:
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
                labels[key] = _labels(choices[variable], is_output, position)
            return labels[key]

        edges = []
        for (left, output, right, position), use in first_use.items():
            source, target = labelled(left, True, output), labelled(right, False, position)
            times = self._use_times(use, source, target)
            consumer = self.graph.nodes[use.consumer]
            hides = use.value.node in self.unshards or use.consumer in self.reduces
            count = counts[left, output, right, position]
            window = self.clustering.window_of_class[right] if hides else None
            if window is not None:
                assert count == self.clustering.window_sizes[window], "alike layers have alike uses"
            forbidden = np.where(np.isinf(times), np.inf, 0.0)
            edges.append(
                Edge(
                    name=f"{self.graph.nodes[use.value.node].name} -> {consumer.name}[{position}]",
                    left=left,
                    right=right,
                    left_labels=source.of_option,
                    right_labels=target.of_option,
                    cost_us=times * count if window is None else forbidden,
                    window=window,
                    window_communication_us=(
                        np.zeros(times.shape)
                        if window is None
                        else np.where(np.isinf(times), 0.0, times)
                    ),
                )
            )
        return edges

    def _use_times(self, use: Use, source: _Labels, target: _Labels) -> FloatArray:
        """[source labels, target labels] Time of the steps, inf for what may not be."""
        consumer = self.graph.nodes[use.consumer]
        sources = tuple(dict.fromkeys(layout for layout, _ in source.distinct))
        targets = tuple(dict.fromkeys(layout for layout, _ in target.distinct))
        table = self.tables.table(self.graph.spec(use.value), sources, targets)
        row_of = {layout: row for row, layout in enumerate(sources)}
        column_of = {layout: column for column, layout in enumerate(targets)}
        rows = [row_of[layout] for layout, _ in source.distinct]
        columns = [column_of[layout] for layout, _ in target.distinct]
        times: FloatArray = table[np.ix_(rows, columns)]
        if is_cast(consumer) and use.consumer in self.reduces:
            times = np.where(_equal_layouts(source, target), 0.0, np.inf)
        aliased = np.array([status == "aliased" for _, status in target.distinct])
        if aliased.any():
            needed = np.array([status != "idle" for _, status in source.distinct])
            stays = _equal_layouts(source, target)
            times = np.where(aliased[None, :] & ~(stays & needed[:, None]), np.inf, times)
            # What stays is in the storage below, of which it may be a small part.
            moved = np.array([status == "moved" for _, status in target.distinct])
            times = np.where(moved[None, :] & stays, np.inf, times)
        return times

    def link_edges(self, choices: Sequence[Sequence[_Choice]]) -> list[Edge]:
        """Pairs of variables that must have the same layouts: cost 0 if they do, else inf."""
        edges: dict[tuple[int, int], Edge] = {}
        for left, right in self._linked_nodes():
            pair = (self.clustering.class_of_node[left], self.clustering.class_of_node[right])
            if pair not in edges:
                edges[pair] = self._link(left, right, choices)
        return list(edges.values())

    def _linked_nodes(self) -> list[tuple[int, int]]:
        """Parameter and gradient, output and tangent, experts forward and backward."""
        parameters = {str(n.target): n.index for n in self.graph.of_kind("parameter")}
        outputs = {f"{n.target}/tangent": n.index for n in self.graph.of_kind("output")}
        links = [(parameters[str(n.target)], n.index) for n in self.graph.of_kind("gradient")]
        links += [(outputs[str(n.target)], n.index) for n in self.graph.of_kind("tangent")]
        forward: dict[str, int] = {}
        for node in self.graph.of_kind("experts"):
            if node.phase == "forward":
                forward[str(node.target)] = node.index
            elif str(node.target) in forward:
                links.append((forward[str(node.target)], node.index))
        return links

    def _link(self, left: int, right: int, choices: Sequence[Sequence[_Choice]]) -> Edge:
        class_of = self.clustering.class_of_node
        first, second = self.graph.nodes[left], self.graph.nodes[right]
        of_left = [_linked_layouts(first, c.option) for c in choices[class_of[left]]]
        of_right = [_linked_layouts(second, c.option) for c in choices[class_of[right]]]
        number = {key: i for i, key in enumerate(dict.fromkeys([*of_left, *of_right]))}
        cost = np.full((len(number), len(number)), np.inf)
        np.fill_diagonal(cost, 0.0)
        return Edge(
            name=f"{first.name} = {second.name}",
            left=class_of[left],
            right=class_of[right],
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


def _labels(choices: Sequence[_Choice], is_output: bool, position: int) -> _Labels:
    number: dict[tuple[Layout, Status | None], int] = {}
    of_option = []
    offered = {choice.status for choice in choices}
    # What a consumer may ask of a producer is whether it is idle, and the other way round whether
    # it is moved or aliased, if it may be either.
    matters: tuple[Status, ...] = ()
    if is_output:
        matters = ("idle",)
    elif position == 0 and "aliased" in offered:
        matters = ("moved", "aliased")
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
