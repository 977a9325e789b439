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
from gt_passes.ep_overlap.schedule_ep_overlap import find_overlap_windows
from gt_passes.simulation import StepSimulation
from gt_passes.simulation.beside import DeviceParts, more_us
from gt_passes.simulation.graph_program import COMPUTE_STREAM
from gt_passes.simulation.timeline import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeBound:
    """The token exchanges of one stretch of a simulated step in which chunks take turns."""

    first_node: str
    exchange_us: float
    exposed_us: float
    hideable_us: float
    """The smaller of the exchange and of what the other chunks compute, all of it beside one."""

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
    tasks = dict(zip(run.nodes, run.timeline.tasks, strict=True))
    records = {record.node_name: record for record in simulation.collectives}
    bounds = []
    for window in windows:
        beside = [task.takes for node in window.nodes if (task := tasks.get(node)) and task.takes]
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
            computed.append(sum(_slowed_us(tasks[node], beside) for node in chunk if node in tasks))
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


def _slowed_us(task: Task, beside: list[DeviceParts]) -> float:
    """How long a task computes with all of it beside an exchange: so much of that it hides."""
    if task.stream != COMPUTE_STREAM:
        return 0.0
    return task.duration_us + (0.0 if task.needs is None else more_us(task.needs, beside))
