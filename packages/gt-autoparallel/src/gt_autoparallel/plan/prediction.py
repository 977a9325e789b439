"""Which collectives a placed step will launch, one by one, with their bytes and their reason.

The prediction is made from the steps that the placed model runs, and a traced step of the placed
model must have exactly these: kind, mesh axis and bytes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch

from gt_autoparallel.argument_checks import check_arguments
from gt_autoparallel.graph.experts import expert_parallel_axes
from gt_autoparallel.graph.parameter_chains import gradient_chains, parameter_chains
from gt_autoparallel.graph.placement_graph import NodePhase, PlacementGraph, PlacementNode
from gt_autoparallel.plan.placement_plan import PlacementPlan, PlannedRedistribution, plan_problem
from gt_autoparallel.prices.experts import experts_exchanged_bytes
from gt_autoparallel.prices.recomputability import experts_of

CollectivePurpose = Literal["unshard", "reduce gradient", "activation", "token exchange"]
"""unshard: a parameter's shards become what its layer computes with. reduce gradient: a gradient
becomes what its parameter's rank holds. activation: anything else between operators.
token exchange: inside the routed experts."""

CollectiveName = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCollective:
    """One launch on each rank."""

    kind: CollectiveName
    axis: str
    """Name of the mesh axis."""

    num_bytes: int
    """Bytes on each rank: the larger of what goes in and what comes out."""

    dtype: torch.dtype
    purpose: CollectivePurpose
    node: str
    """Name of the node for which it runs: the consumer of what it makes."""

    parameter: str | None
    """The parameter that is unsharded, or whose gradient is reduced."""

    phase: NodePhase
    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTotal:
    """Collectives alike in kind, axis and purpose."""

    kind: CollectiveName
    axis: str
    purpose: CollectivePurpose
    count: int
    num_bytes: int


def predicted_collectives(plan: PlacementPlan) -> tuple[PlannedCollective, ...]:
    """Every collective of one training step, by the node for which it runs.

    Raises:
        PlacementInputError: what is given is no plan.
    """
    check_arguments("predicted_collectives", plan_problem(plan))
    of_node: dict[int, list[PlannedCollective]] = {}
    reasons = _Reasons(plan.graph)
    for redistribution in plan.redistributions:
        of_node.setdefault(redistribution.use.consumer, []).extend(
            _of_redistribution(plan, redistribution, reasons)
        )
    backward_of = experts_of(plan.graph)
    for node in plan.graph.of_kind("experts"):
        exchanges = _of_experts(plan, node)
        of_node.setdefault(node.index, []).extend(exchanges)
        if node.phase == "forward" and node.index in plan.recomputed:
            # Not the token counts, which come first.
            again = [replace(each, phase="backward") for each in exchanges[1:]]
            of_node.setdefault(backward_of[node.index], []).extend(again)
    return tuple(each for index in sorted(of_node) for each in of_node[index])


def collective_totals(collectives: tuple[PlannedCollective, ...]) -> tuple[CollectiveTotal, ...]:
    """Counts and bytes by purpose, kind and axis, in that order."""
    counts: Counter[tuple[CollectivePurpose, CollectiveName, str]] = Counter()
    num_bytes: Counter[tuple[CollectivePurpose, CollectiveName, str]] = Counter()
    for each in collectives:
        key = (each.purpose, each.kind, each.axis)
        counts[key] += 1
        num_bytes[key] += each.num_bytes
    return tuple(
        CollectiveTotal(
            purpose=purpose,
            kind=kind,
            axis=axis,
            count=counts[purpose, kind, axis],
            num_bytes=num_bytes[purpose, kind, axis],
        )
        for purpose, kind, axis in sorted(counts)
    )


def _of_redistribution(
    plan: PlacementPlan, redistribution: PlannedRedistribution, reasons: _Reasons
) -> list[PlannedCollective]:
    consumer = plan.graph.nodes[redistribution.use.consumer]
    dtype = plan.graph.spec(redistribution.use.value).dtype
    purpose, parameter = reasons.of(redistribution)
    return [
        PlannedCollective(
            kind=step.kind,
            axis=plan.mesh.names[step.axis],
            num_bytes=max(prod(step.input_shape), prod(step.output_shape)) * dtype.itemsize,
            dtype=dtype,
            purpose=purpose,
            node=consumer.name,
            parameter=parameter,
            phase=plan.phase_of(redistribution),
            module=consumer.module,
        )
        for step in redistribution.steps
        if step.kind != "slice"
    ]


def _of_experts(plan: PlacementPlan, node: PlacementNode) -> list[PlannedCollective]:
    """The all-to-alls of routed experts; bytes at balanced routing."""
    operands = plan.graph.operand_specs(node)
    option = plan.options[node.index]
    axes = expert_parallel_axes(node, option)
    exchanged = experts_exchanged_bytes(node, operands, option, plan.mesh)
    return [
        PlannedCollective(
            kind="all_to_all",
            axis=" x ".join(plan.mesh.names[axis] for axis in axes),
            num_bytes=num_bytes,
            dtype=operands[0].dtype,
            purpose="token exchange",
            node=node.name,
            parameter=None,
            phase=node.phase,
            module=node.module,
        )
        for num_bytes in exchanged
    ]


class _Reasons:
    """Why redistributions run, by where they stand on the way of parameters and gradients."""

    def __init__(self, graph: PlacementGraph) -> None:
        self._unsharded = parameter_chains(graph)
        self._reduced = gradient_chains(graph)

    def of(self, redistribution: PlannedRedistribution) -> tuple[CollectivePurpose, str | None]:
        producer = redistribution.use.value.node
        if producer in self._unsharded:
            return "unshard", self._unsharded[producer]
        consumer = redistribution.use.consumer
        if consumer in self._reduced:
            return "reduce gradient", self._reduced[consumer]
        return "activation", None
