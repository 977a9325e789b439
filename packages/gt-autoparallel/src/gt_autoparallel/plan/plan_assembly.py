"""From the option of each node to a whole plan: steps, times, windows and bytes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from gt_autoparallel.graph.layer_names import backward_window, window_name
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.parameter_chains import (
    ParameterMove,
    gradient_chains,
    parameter_chains,
)
from gt_autoparallel.graph.placement_graph import PlacementGraph
from gt_autoparallel.graph.redistribution import redistribution_steps
from gt_autoparallel.plan.placement_plan import (
    ModelSignature,
    PlacementPlan,
    PlannedRedistribution,
    PlannedWindow,
    SolverReport,
    step_us,
)
from gt_autoparallel.prices.costs import StepPrices
from gt_autoparallel.prices.memory import MemoryBreakdown
from gt_autoparallel.problem.constraints import ResolvedRequest
from gt_autoparallel.problem.requested_memory import requested_memory
from gt_autoparallel.rules import replicated_operators


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTimes:
    """When what runs, and how long; as a ``PlacementPlan`` has it."""

    compute_us: tuple[float, ...]
    redistributions: tuple[PlannedRedistribution, ...]
    windows: tuple[PlannedWindow, ...]

    @property
    def step_us(self) -> float:
        """What the step costs."""
        return step_us(self.windows, self.redistributions)


def planned_times(
    graph: PlacementGraph,
    mesh: MeshShape,
    options: Sequence[NodeOption],
    prices: StepPrices,
    *,
    recomputed: Collection[int] = (),
) -> PlannedTimes:
    """Times of a step in which each node runs with its option, and ``recomputed`` nodes twice."""
    runs_again = frozenset(recomputed)
    # By their first node, which is not what runs again in one.
    compute: dict[str, list[float]] = {window_name(node): [] for node in graph.nodes}
    communication: dict[str, list[float]] = defaultdict(list)
    compute_us = []
    for node in graph.nodes:
        operands = graph.operand_specs(node)
        compute_us.append(prices.compute_us(node, operands, options[node.index], mesh))
        compute[window_name(node)].append(compute_us[-1])
        if node.index in runs_again:
            again_us = compute_us[-1]
            if node.phase == "backward":
                again_us = prices.between_products_us(node, operands, options[node.index], mesh)
            compute[backward_window(node)].append(again_us)
    unshards, reduces = parameter_chains(graph), gradient_chains(graph)
    redistributions = []
    for use in graph.uses:
        there = options[use.value.node].output(use.value.output)
        wanted = options[use.consumer].operands[use.position]
        if there == wanted:
            continue
        spec = graph.spec(use.value)
        steps = redistribution_steps(spec.shape, there, wanted, mesh)
        if not steps:
            continue
        move: ParameterMove | None = None
        if use.value.node in unshards:
            move = "unshard"
        elif use.consumer in reduces:
            move = "reduce_grad"
        consumer = graph.nodes[use.consumer]
        times = [prices.step_time(step, spec.dtype, mesh, move) for step in steps]
        first = PlannedRedistribution(
            use=use,
            steps=steps,
            in_full_us=math.fsum(time.in_full_us for time in times),
            hidden_us=math.fsum(time.hidden_us for time in times),
            window=None if move is None else window_name(consumer),
        )
        redistributions.append(first)
        # Routed experts run again on the operands that their backward has been given.
        if use.consumer in runs_again and consumer.kind != "experts":
            later = None if move is None else backward_window(consumer)
            redistributions.append(replace(first, window=later, again=True))
    for each in redistributions:
        if each.window is not None:
            communication[each.window].append(each.hidden_us)
    return PlannedTimes(
        compute_us=tuple(compute_us),
        redistributions=tuple(redistributions),
        windows=tuple(
            PlannedWindow(
                name=name,
                compute_us=math.fsum(times),
                communication_us=math.fsum(communication.get(name, ())),
            )
            for name, times in compute.items()
        ),
    )


def assemble_plan(
    *,
    graph: PlacementGraph,
    mesh: MeshShape,
    options: Sequence[NodeOption],
    recomputed: Sequence[int] = (),
    prices: StepPrices,
    request: ResolvedRequest,
    signature: ModelSignature,
    solver: SolverReport,
    memory: MemoryBreakdown | None = None,
) -> PlacementPlan:
    """The plan in which each node runs with its option, and ``recomputed`` nodes run twice.

    ``memory`` is that of the request, if it has been counted.
    """
    if memory is None:
        memory = requested_memory(graph, options, mesh, request, recomputed=frozenset(recomputed))
    times = planned_times(graph, mesh, options, prices, recomputed=recomputed)
    return PlacementPlan(
        mesh=mesh,
        graph=graph,
        options=tuple(options),
        recomputed=tuple(recomputed),
        redistributions=times.redistributions,
        compute_us=times.compute_us,
        windows=times.windows,
        memory=memory,
        request=request,
        prices=prices,
        solver=solver,
        signature=signature,
        replicated_nodes=tuple(
            node.name for node in replicated_operators(graph, request.replicate_unknown)
        ),
    )
