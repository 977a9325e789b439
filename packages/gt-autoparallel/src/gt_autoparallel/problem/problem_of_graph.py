"""From a graph and prices to the optimization problem, and from its solution back to options.

    variable   a class of nodes (``clustering``): the options of one, for all of them
    window     a layer, or a top-level module outside of layers, in one phase
    edge       a use: from the layout that leaves the producer to the one that the consumer wants,
               with the price of the steps between them, as often as the use occurs
    link       a gradient has its parameter's layout, a tangent its output's; the backward of routed
               experts runs as their forward

A node of the forward may run again in the backward (``saved_storages``): its compute and its
operands' redistributions then count a second time, in the backward's window as far as windows count
them. Bytes have a row for each kind of layers and each moment of its backward that may be the
fullest, and one for the loss (``memory_parts``).

What of parameters' and gradients' own redistributions (``parameter_chains``) can hide goes to their
windows' communication, all else counts in full. A gradient is not redistributed before its cast:
its sum over ranks is done in the dtype that was asked for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch.distributed.tensor import Placement

from gt_autoparallel.graph.layer_names import layer_of_module
from gt_autoparallel.graph.layer_turns import layer_turns, read_late
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.parameter_chains import (
    gradient_chains,
    parameter_chains,
    summed_later,
)
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode, Value
from gt_autoparallel.prices.costs import StepPrices
from gt_autoparallel.prices.memory import gradient_copies
from gt_autoparallel.prices.microbatches import (
    Microbatches,
    accumulated_gradients,
    gathered_parameters,
)
from gt_autoparallel.prices.needed_storages import needed_storages
from gt_autoparallel.prices.recomputability import experts_of
from gt_autoparallel.prices.saved_storages import SavedStorages, Status, saved_storages
from gt_autoparallel.problem.choices import Choice
from gt_autoparallel.problem.clustering import Clustering, cluster_layers
from gt_autoparallel.problem.constraints import LayoutConstraint
from gt_autoparallel.problem.memory_parts import LOSS_ROW, MemoryBuilder, Moments
from gt_autoparallel.problem.problem_parts import (
    OptionsOf,
    PartsBuilder,
    PartsKey,
    ProblemParts,
    problem_parts,
)
from gt_autoparallel.problem.redistribution_tables import RedistributionTables
from gt_autoparallel.solver import Mixture, evaluate_mixture
from gt_autoparallel.solver.problem import Block, FloatArray, MemoryRow, Problem, Variable, Window

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

    given_back: tuple[FloatArray, ...]
    """As ``MemoryParts.given_back``."""

    def options_of_nodes(self, solution: Sequence[int] | Mixture) -> tuple[NodeOption, ...]:
        """The option of each node under a choice for each variable, or a mixture."""
        return tuple(choice.option for choice in self._choices_of_nodes(solution))

    def recomputed_nodes(self, solution: Sequence[int] | Mixture) -> tuple[int, ...]:
        """The nodes that run again in the backward under a choice for each variable, in order.

        Those that a choice lets run again for nobody, which may cost nothing, are not among them.
        """
        chosen = frozenset(self.chosen_again(solution))
        return needed_storages(self.graph, self.options_of_nodes(solution), chosen).recomputed

    def chosen_again(self, solution: Sequence[int] | Mixture) -> tuple[int, ...]:
        """All nodes that a choice for each variable lets run again, in order."""
        forward_of = {backward: forward for forward, backward in experts_of(self.graph).items()}
        found = []
        for node, choice in enumerate(self._choices_of_nodes(solution)):
            if choice.status in ("recomputed", "products"):
                found.append(node)
            elif choice.status == "repeated":
                found.append(forward_of[node])
        return tuple(sorted(found))

    def _choices_of_nodes(self, solution: Sequence[int] | Mixture) -> list[Choice]:
        found: dict[int, Choice] = {}
        if isinstance(solution, Mixture):
            taken = self._in_turn(solution)
        else:
            taken = [(choice,) for choice in solution]
        members_of = self.clustering.members
        for choices, members, things in zip(self.choices, members_of, taken, strict=True):
            of_members = things * len(members) if len(things) == 1 else things
            for node, choice in zip(members, of_members, strict=True):
                found[node] = choices[choice]
        return [found[node] for node in range(len(found))]

    def _in_turn(self, mixture: Mixture) -> list[tuple[int, ...]]:
        """The choices of things as layers take them: who gives back least stands first.

        What of alike layers takes which choices changes no cost. In this order no moment in the
        middle is fuller than the first and the last one, which have rows: what is given back rises,
        so that the sum of it, as far as one has come, is largest at one of its ends.
        """
        taken = list(mixture.choices)
        for block in self.problem.blocks:
            given_back = sum(
                self.given_back[variable][list(taken[variable])] for variable in block.variables
            )
            order = np.argsort(given_back, kind="stable").tolist()
            for variable in block.variables:
                taken[variable] = tuple(taken[variable][thing] for thing in order)
        return taken

    def solution_of(
        self, options: Sequence[NodeOption], recomputed: Collection[int] = ()
    ) -> tuple[int, ...]:
        """A choice for each variable that means ``options``, those of the classes' first nodes.

        ``recomputed`` are the nodes that run again; what is kept for it follows.

        Raises:
            KeyError: a node cannot take its option.
        """
        return tuple(things[0] for things in self._things_of(options, recomputed))

    def mixture_of(
        self, options: Sequence[NodeOption], recomputed: Collection[int] = ()
    ) -> Mixture:
        """The mixture that means ``options`` of nodes, and that ``recomputed`` nodes run again.

        Raises:
            KeyError: a node cannot take its option.
        """
        return evaluate_mixture(self.problem, self._things_of(options, recomputed))

    def _things_of(
        self, options: Sequence[NodeOption], recomputed: Collection[int]
    ) -> list[tuple[int, ...]]:
        """For each variable the choice of each thing of its block, or that of the first node."""
        storages = needed_storages(self.graph, options, recomputed)
        forward_of = {backward: forward for forward, backward in experts_of(self.graph).items()}
        in_blocks = {variable for block in self.problem.blocks for variable in block.variables}

        def statuses_of(node: PlacementNode) -> tuple[Status, ...]:
            if node.index in forward_of:
                if forward_of[node.index] in recomputed:
                    return ("repeated",)
                return ("products" if node.index in recomputed else "kept",)
            if node.index in recomputed:
                return ("recomputed",)
            # Where views are as large as what they view, only "moved" may be offered.
            if node.index in storages.kept:
                return ("moved", "kept")
            if node.index not in storages.aliased:
                return ("idle",)
            viewed = node.operands[0]
            is_counted = self.saved.counts_while_kept(self.graph, viewed)
            lies_below = is_counted or viewed.node in storages.recomputed
            return ("aliased", "moved") if lies_below else ("moved",)

        def choices_of(nodes: Sequence[int], choices: Sequence[Choice]) -> Iterator[int]:
            known: dict[NodeOption, list[int]] = {}  # nearly all layers take the same few options
            for node in map(self.graph.nodes.__getitem__, nodes):
                wanted = options[node.index]
                if wanted not in known:
                    known[wanted] = [i for i, each in enumerate(choices) if each.option == wanted]
                positions = known[wanted]
                if not positions:
                    raise KeyError(f"{node.name} has no option {wanted}")
                fitting = [
                    i for each in statuses_of(node) for i in positions if choices[i].status == each
                ]
                yield (fitting or positions)[0]

        members_of = self.clustering.members
        found = []
        for variable, (choices, members) in enumerate(zip(self.choices, members_of, strict=True)):
            deciding = members if variable in in_blocks else members[:1]
            found.append(tuple(choices_of(deciding, choices)))
        return found


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
    loss_bytes: int = 0,
    accumulates_gradients: bool = False,
    all_moments: bool = True,
    tables: RedistributionTables | None = None,
    times: dict[int, FloatArray] | None = None,
    parts: dict[PartsKey, ProblemParts] | None = None,
) -> PlacementProblem:
    """The problem whose solution is the best placement of ``graph``.

    ``recomputes`` says whether nodes of the forward may run again, which saves nothing but memory;
    ``microbatches`` how a step runs the graph, if it does so several times; ``loss_bytes`` and
    ``accumulates_gradients`` are as in ``ResolvedRequest``. ``all_moments`` says whether a
    budget has rows for every moment of the backward that may be the fullest (``memory_parts``).

    ``options_of`` gives alike nodes the same options. Options that break a constraint are
    forbidden, and a node with constraints shares its choice only with alike nodes that have the
    same ones. ``tables``, ``times`` and ``parts`` are of earlier problems of the same graph, mesh
    and prices; they get what is made anew.
    """
    of_node: dict[str, tuple[Demand, ...]] = {}
    for each in constraints:
        demand = (each.side, each.position, each.placements)
        of_node[each.node] = (*of_node.get(each.node, ()), demand)
    # Sums over microbatches are reduced when nothing else runs.
    moments: Moments = "all" if all_moments else "usual"
    if memory_budget_bytes is None or microbatches is not None:
        moments = "everything"
    saved = saved_storages(
        graph, recomputes=recomputes, microbatches=microbatches, by_layer=moments == "all"
    )
    unshards, reduces = parameter_chains(graph), gradient_chains(graph)
    reduced = accumulated_gradients(graph) if microbatches is None else {}
    # What alike nodes must have in common besides themselves.
    described: dict[int, Hashable] = {
        node.index: (
            of_node.get(node.name),
            saved.description(node),
            node.index in unshards,
            node.index in reduces,
            tuple(reduced.get(Value(node.index, at)) for at in range(len(node.outputs))),
            tuple(
                _origin(graph, node, value.node)
                for value in node.operands
                if value.node in unshards or node.index in reduces
            ),
        )
        for node in graph.nodes
    }
    turns = layer_turns(graph)
    clustering = cluster_layers(graph, in_turn=turns.layers, distinguished=described)
    known = {} if parts is None else parts
    key = (clustering, recomputes, moments)
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
                times={} if times is None else times,
                forward_of={backward: forward for forward, backward in experts_of(graph).items()},
            ),
            MemoryBuilder(
                graph=graph,
                mesh=mesh,
                clustering=clustering,
                saved=saved,
                optimizer_state_copies=optimizer_state_copies,
                gradients=gradient_copies(
                    microbatches, accumulates_gradients=accumulates_gradients
                ),
                has_loss=loss_bytes > 0,
                gathered=gathered_parameters(graph),
                reduced=reduced,
                moments=moments,
                turns=turns,
                read_late=read_late(
                    graph,
                    turns,
                    may_run_again={
                        node for node, each in saved.statuses.items() if "recomputed" in each
                    },
                ),
            ),
            options_of,
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
                memory_bytes=found.memory.num_bytes[number],
                further_compute_us=found.again_us[number],
            )
        )
    blocks = layer_blocks(
        graph,
        clustering,
        crossing=crossing_nodes(graph),
        passing_bytes=found.memory.passing_bytes,
        rows_of_window=found.memory.rows_of_window,
    )
    problem = Problem(
        variables=tuple(variables),
        edges=found.edges,
        windows=tuple(
            Window(name=name, multiplicity=size)
            for name, size in zip(clustering.window_names, clustering.window_sizes, strict=True)
        ),
        memory=tuple(
            MemoryRow(
                name=name,
                budget_bytes=budget,
                fixed_bytes=float(loss_bytes) if name == LOSS_ROW else 0.0,
            )
            for name in found.memory.rows
        ),
        blocks=blocks if recomputes else (),
    )
    return PlacementProblem(
        problem=problem,
        graph=graph,
        clustering=clustering,
        saved=saved,
        choices=found.choices,
        given_back=found.memory.given_back,
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


# Which variables stand for alike layers that may be placed, and recompute, differently.
#
# Alike layers share a choice, so that under a budget all of them recompute a value or none does,
# and what is best lies between. The solver may therefore let each layer choose for itself
# (``solver.mixtures``), all but values that go from one layer to another and what reads them:
# these are the same for all layers of a kind. Then no layer sees what another one does, and each
# of a kind has the same costs.
def crossing_nodes(graph: PlacementGraph) -> frozenset[int]:
    """Nodes of a layer that another layer's nodes read, or that read another layer's."""
    found: set[int] = set()
    for use in graph.uses:
        maker, reader = (
            layer_of_module(graph.nodes[index].module) for index in (use.value.node, use.consumer)
        )
        if maker is not None and maker != reader:
            found.add(use.value.node)
            if reader is not None:
                found.add(use.consumer)
    return frozenset(found)


def layer_blocks(
    graph: PlacementGraph,
    clustering: Clustering,
    *,
    crossing: frozenset[int],
    passing_bytes: Mapping[int, Sequence[FloatArray]],
    rows_of_window: Mapping[str, Sequence[int]],
) -> tuple[Block, ...]:
    """A block for each kind of layers of which there are several.

    Args:
        graph: whose nodes are clustered.
        clustering: of its alike layers.
        crossing: nodes that are the same in all layers of a kind.
        passing_bytes: for each memory row of a kind's backward, for each class of nodes [options]:
            bytes that are there for one layer at a time.
        rows_of_window: these rows, by the kind's window.
    """
    inner: dict[tuple[str, ...], list[int]] = defaultdict(list)
    windows: dict[tuple[str, ...], set[int]] = defaultdict(set)
    for number, members in enumerate(clustering.members):
        layers = [layer_of_module(graph.nodes[node].module) for node in members]
        things = tuple(layer for layer in layers if layer is not None)
        if len(things) < 2:
            continue
        windows[things].add(clustering.window_of_class[number])
        if members[0] not in crossing:
            inner[things].append(number)
    blocks = []
    for things, variables in inner.items():
        names = {clustering.window_names[window] for window in windows[things]}
        blocks.append(
            Block(
                name=things[0],
                size=len(things),
                variables=tuple(variables),
                windows=tuple(sorted(windows[things])),
                passing_bytes={
                    row: tuple(passing_bytes[row][variable] for variable in variables)
                    for name in sorted(names)
                    for row in rows_of_window.get(name, ())
                },
            )
        )
    return tuple(blocks)
