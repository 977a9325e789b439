"""From a graph and prices to the optimization problem, and from its solution back to options.

    variable   a class of nodes (``clustering``): the options of one, for all of them
    window     a layer, or a top-level module outside of layers, in one phase
    edge       a use: from the layout that leaves the producer to the one that the consumer wants,
               with the price of the steps between them, as often as the use occurs
    link       a gradient has its parameter's layout, a tangent its output's; the backward of routed
               experts runs as their forward

A node of the forward may run again in the backward (``saved_storages``): its compute and its
operands' redistributions then count a second time, in the backward's window as far as windows count
them. Bytes have a row for each layer that may make something again, with what it makes.

What of parameters' and gradients' own redistributions (``parameter_chains``) can hide goes to their
windows' communication, all else counts in full. A gradient is not redistributed before its cast:
its sum over ranks is done in the dtype that was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from torch.distributed.tensor import Placement

from gt_autoparallel.graph.layer_names import layer_of_module
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.parameter_chains import (
    gradient_chains,
    parameter_chains,
    summed_later,
)
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode
from gt_autoparallel.prices.costs import StepPrices
from gt_autoparallel.prices.memory import needed_storages
from gt_autoparallel.prices.microbatches import Microbatches
from gt_autoparallel.prices.recomputability import experts_of
from gt_autoparallel.prices.saved_storages import SavedStorages, Status, saved_storages
from gt_autoparallel.problem.clustering import Clustering, cluster_layers
from gt_autoparallel.problem.constraints import LayoutConstraint
from gt_autoparallel.problem.counted_layers import (
    crossing_nodes,
    kinds_of_choices,
    layer_groups,
    with_equal_crossings,
)
from gt_autoparallel.problem.problem_parts import (
    Choice,
    OptionsOf,
    PartsBuilder,
    PartsKey,
    ProblemParts,
    problem_parts,
)
from gt_autoparallel.problem.redistribution_tables import RedistributionTables
from gt_autoparallel.solver.problem import MemoryRow, Problem, Variable, Window

Demand = tuple[str, int, tuple[Placement | None, ...]]
"""A layout constraint without its node: side, position, and a placement or None for each axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementProblem:
    """The problem of a graph, and how to read its solution."""

    problem: Problem
    graph: PlacementGraph
    clustering: Clustering
    saved: SavedStorages
    choices: tuple[tuple[Choice, ...], ...]
    """What each option of each variable means."""

    def options_of_nodes(self, solution: Sequence[int]) -> tuple[NodeOption, ...]:
        """The option of each node under a choice for each variable."""
        return tuple(
            self.choices[variable][solution[variable]].option
            for variable in self.clustering.class_of_node
        )

    def recomputed_nodes(self, solution: Sequence[int]) -> tuple[int, ...]:
        """The nodes that run again in the backward under a choice for each variable, in order.

        Those that a choice lets run again for nobody, which may cost nothing, are not among them.
        """
        chosen = frozenset(self.chosen_again(solution))
        return needed_storages(self.graph, self.options_of_nodes(solution), chosen).recomputed

    def chosen_again(self, solution: Sequence[int]) -> tuple[int, ...]:
        """All nodes that a choice for each variable lets run again, in order."""
        forward_of = {backward: forward for forward, backward in experts_of(self.graph).items()}
        found = []
        for node, variable in enumerate(self.clustering.class_of_node):
            status = self.choices[variable][solution[variable]].status
            if status in ("recomputed", "products"):
                found.append(node)
            elif status == "repeated":
                found.append(forward_of[node])
        return tuple(sorted(found))

    def solution_of(
        self, options: Sequence[NodeOption], recomputed: Collection[int] = ()
    ) -> tuple[int, ...]:
        """A choice for each variable that means ``options``, those of the classes' first nodes.

        ``recomputed`` are the nodes that run again; what is kept for it follows.

        Raises:
            KeyError: a node cannot take its option.
        """
        storages = needed_storages(self.graph, options, recomputed)
        forward_of = {backward: forward for forward, backward in experts_of(self.graph).items()}
        found = []
        for choices, members in zip(self.choices, self.clustering.members, strict=True):
            node = self.graph.nodes[members[0]]
            wanted = options[node.index]
            positions = [i for i, choice in enumerate(choices) if choice.option == wanted]
            if not positions:
                raise KeyError(f"{node.name} has no option {wanted}")
            # Where views are as large as what they view, only "moved" may be offered.
            statuses: tuple[Status, ...] = ("idle",)
            if node.index in forward_of:
                statuses = ("products" if node.index in recomputed else "kept",)
                if forward_of[node.index] in recomputed:
                    statuses = ("repeated",)
            elif node.index in recomputed:
                statuses = ("recomputed",)
            elif node.index in storages.kept:
                statuses = ("moved", "kept")
            elif node.index in storages.aliased:
                viewed = node.operands[0]
                is_counted = self.saved.counts_while_kept(self.graph, viewed)
                lies_below = is_counted or viewed.node in storages.recomputed
                statuses = ("aliased", "moved") if lies_below else ("moved",)
            fitting = [i for each in statuses for i in positions if choices[i].status == each]
            found.append((fitting or positions)[0])
        return tuple(found)


def placement_problem(
    graph: PlacementGraph,
    mesh: MeshShape,
    options_of: OptionsOf,
    prices: StepPrices,
    *,
    memory_budget_bytes: float | None = None,
    optimizer_state_copies: float = 2.0,
    constraints: Sequence[LayoutConstraint] = (),
    recomputes: bool = False,
    microbatches: Microbatches | None = None,
    counted: Clustering | None = None,
    tables: RedistributionTables | None = None,
    parts: dict[PartsKey, ProblemParts] | None = None,
) -> PlacementProblem:
    """The problem whose solution is the best placement of ``graph``.

    ``counted`` is the clustering of a problem of the same graph, whose alike layers are to choose
    in groups (``counted_layers``); None: all do the same.
    ``recomputes`` says whether nodes of the forward may run again, which saves nothing but memory;
    ``microbatches`` how a step runs the graph, if it does so several times.

    ``options_of`` gives alike nodes the same options. Options that break a constraint are
    forbidden, and a node with constraints shares its choice only with alike nodes that have the
    same ones. ``tables`` and ``parts`` are of earlier problems of the same graph, mesh and prices;
    they get what is made anew.
    """
    of_node: dict[str, tuple[Demand, ...]] = {}
    for each in constraints:
        demand = (each.side, each.position, each.placements)
        of_node[each.node] = (*of_node.get(each.node, ()), demand)
    saved = saved_storages(graph, recomputes=recomputes, microbatches=microbatches)
    unshards, reduces = parameter_chains(graph), gradient_chains(graph)
    groups = {} if counted is None else layer_groups(graph, counted)
    crossing = crossing_nodes(graph) if recomputes else frozenset()
    # What alike nodes must have in common besides themselves.
    described: dict[int, Hashable] = {
        node.index: (
            of_node.get(node.name),
            saved.description(node),
            groups.get(layer_of_module(node.module) or ""),
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
    key = (clustering, recomputes)
    if key not in known:
        known[key] = problem_parts(
            PartsBuilder(
                graph=graph,
                mesh=mesh,
                prices=prices,
                clustering=clustering,
                saved=saved,
                unshards=frozenset(unshards),
                reduces=frozenset(reduces),
                summed_later=summed_later(graph),
                tables=RedistributionTables(mesh, prices) if tables is None else tables,
                forward_of={backward: forward for forward, backward in experts_of(graph).items()},
            ),
            options_of,
            optimizer_state_copies,
        )
    found = known[key]
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
                memory_bytes=found.memory_bytes[number],
                further_compute_us=found.again_us[number],
                kinds=None if node.index in crossing else kinds_of_choices(choices),
            )
        )
    problem = Problem(
        variables=tuple(variables),
        edges=found.edges,
        windows=tuple(
            Window(name=name, multiplicity=size)
            for name, size in zip(clustering.window_names, clustering.window_sizes, strict=True)
        ),
        memory=tuple(
            MemoryRow(name=name, budget_bytes=budget, fixed_bytes=0.0) for name in found.memory_rows
        ),
    )
    if counted is not None:
        problem = with_equal_crossings(problem, found.choices, clustering, counted, crossing)
    return PlacementProblem(
        problem=problem, graph=graph, clustering=clustering, saved=saved, choices=found.choices
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


def _origin(graph: PlacementGraph, node: PlacementNode, producer: int) -> str | None:
    """Where from a window's communication comes: None for the node's own layer, else the name.

    Nodes of alike layers share windows, so their communication must come from alike nodes.
    """
    source = graph.nodes[producer]
    same = layer_of_module(source.module) == layer_of_module(node.module)
    return None if same else source.name
