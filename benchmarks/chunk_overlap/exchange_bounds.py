"""How much of the token exchange of chunks could be hidden at best, beside what a schedule hides.

While a chunk exchanges, the others compute: of its exchange at most as much is hidden as they have
to compute, and of all exchanges of a stretch at most as much as is computed there. What the chunk
itself computes meanwhile (the gradient of a weight) can hide some as well, so a schedule may beat
the bound a little where there are few other chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from gt_passes.analysis.order_constraints import OrderConstraints
from gt_passes.ep_overlap.chunk_metadata import ChunkRegions
from gt_passes.ep_overlap.exchange_operators import is_exchange_launch, is_token_exchange
from gt_passes.ep_overlap.overlap_windows import find_overlap_windows
from gt_passes.simulation import StepSimulation
from gt_passes.simulation.graph_program import COMPUTE_STREAM


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeBound:
    """The token exchanges of one stretch of a simulated step in which chunks take turns."""

    first_node: str
    exchange_us: float
    exposed_us: float
    hideable_us: float
    """The smaller of the exchange and of what the other chunks compute."""

    @property
    def least_exposed_us(self) -> float:
        """What no schedule of these chunks hides, by the bound."""
        return self.exchange_us - self.hideable_us


def exchange_bounds(
    graph_module: GraphModule, simulation: StepSimulation
) -> tuple[ExchangeBound, ...]:
    """The bound of every stretch that ``schedule-ep-overlap`` would schedule.

    Args:
        graph_module: with chunks, scheduled or not.
        simulation: of the same graph, uncompiled.
    """
    nodes = list(graph_module.graph.nodes)
    regions = ChunkRegions.of(graph_module).regions
    windows, _ = find_overlap_windows(regions, nodes, OrderConstraints(graph_module))
    run = simulation.run
    compute_us = {
        node: task.duration_us
        for node, task in zip(run.nodes, run.timeline.tasks, strict=True)
        if task.stream == COMPUTE_STREAM
    }
    records = {record.node_name: record for record in simulation.collectives}
    bounds = []
    for window in windows:
        computed: list[float] = []
        exchanged: list[float] = []
        exposed = 0.0
        for body in window.bodies.values():
            chunk = [window.nodes[i] for i in body]
            found = [
                records[node.name]
                for node in chunk
                if is_exchange_launch(node) and is_token_exchange(node) and node.name in records
            ]
            computed.append(sum(compute_us.get(node, 0.0) for node in chunk))
            exchanged.append(sum(record.duration_us for record in found))
            exposed += sum(record.exposed_us for record in found)
        by_others = sum(
            min(exchange, sum(computed) - own)
            for exchange, own in zip(exchanged, computed, strict=True)
        )
        bounds.append(
            ExchangeBound(
                first_node=window.nodes[0].name,
                exchange_us=sum(exchanged),
                exposed_us=exposed,
                hideable_us=min(by_others, sum(computed)),
            )
        )
    return tuple(bounds)
