"""Memory of a plan for what was asked: optimizer state, loss, microbatches."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.placement_graph import PlacementGraph
from gt_autoparallel.prices.memory import MemoryBreakdown, plan_memory
from gt_autoparallel.problem.constraints import ResolvedRequest


def requested_memory(
    graph: PlacementGraph,
    options: Sequence[NodeOption],
    mesh: MeshShape,
    request: ResolvedRequest,
    *,
    recomputed: Collection[int],
) -> MemoryBreakdown:
    """What a rank holds, in bytes by part.

    Args:
        graph: whose nodes are placed.
        options: of each node.
        mesh: of the ranks.
        request: what the plan is for.
        recomputed: indices of the nodes that run again in the backward.
    """
    return plan_memory(
        graph,
        options,
        mesh,
        optimizer_state_copies=request.optimizer_state_copies,
        recomputed=recomputed,
        microbatches=request.microbatches,
        loss_bytes=request.loss_bytes,
        accumulates_gradients=request.accumulates_gradients,
    )
