"""How far a simulated time moves when the machine is not quite the assumed one.

Each group of constants is made faster and slower by the same fraction, alone and all together. What
a schedule gains should survive this; a gain that does not is the model's, not the schedule's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import GraphModule

from gt_passes.simulation.cost_model import CostModel
from gt_passes.simulation.graph_program import GraphProgram
from gt_passes.simulation.hardware import Hardware, ScalesWith

_GROUPS: tuple[ScalesWith, ...] = ("compute", "memory", "network", "latency")


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityRange:
    """A time with one group of constants faster, and slower."""

    group: str
    faster_us: float
    slower_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """A time, and how it moves."""

    fraction: float
    """0.3: rates are multiplied by 1.3 and by 0.7, latencies divided."""

    time_us: float
    ranges: tuple[SensitivityRange, ...]
    """Compute, memory, network and latency alone, then all together."""

    def __str__(self) -> str:
        """One line, in milliseconds."""
        parts = ", ".join(
            f"{r.group} {r.faster_us / 1000:,.0f}-{r.slower_us / 1000:,.0f}" for r in self.ranges
        )
        return f"{self.time_us / 1000:,.0f} ms simulated; with ±{self.fraction:.0%} of {parts} ms"


def sensitivity(
    time_us: Callable[[Hardware], float], hardware: Hardware, *, fraction: float = 0.3
) -> Sensitivity:
    """Evaluate a time on machines that are faster and slower.

    Args:
        time_us: the time on a machine, in microseconds.
        hardware: the assumed machine.
        fraction: how much faster and slower, between 0 and 1.

    Raises:
        ValueError: the fraction is not between 0 and 1.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction is {fraction!r}; allowed: between 0 and 1, both excluded")
    ranges = [
        SensitivityRange(
            group=group,
            faster_us=time_us(hardware.scaled(group, 1 + fraction)),
            slower_us=time_us(hardware.scaled(group, 1 - fraction)),
        )
        for group in _GROUPS
    ]
    faster = slower = hardware
    for group in _GROUPS:
        faster, slower = faster.scaled(group, 1 + fraction), slower.scaled(group, 1 - fraction)
    ranges.append(
        SensitivityRange(group="all", faster_us=time_us(faster), slower_us=time_us(slower))
    )
    return Sensitivity(fraction=fraction, time_us=time_us(hardware), ranges=tuple(ranges))


def step_sensitivity(
    graph_module: GraphModule,
    cost_model: CostModel,
    *,
    fraction: float = 0.3,
    program: GraphProgram | None = None,
    extra_us: Callable[[Hardware], float] = lambda hardware: 0.0,
) -> Sensitivity:
    """``sensitivity`` of the time of a captured graph.

    Args:
        graph_module: a captured graph with recorded values.
        cost_model: prices its nodes; its machine is the assumed one.
        fraction: as for ``sensitivity``.
        program: of the same graph, if it has been read already.
        extra_us: what follows the graph, such as the optimizer.
    """
    read = GraphProgram(graph_module, cost_model) if program is None else program

    def time_us(hardware: Hardware) -> float:
        run = read.run(cost_model.with_hardware(hardware))
        return run.timeline.makespan_us + extra_us(hardware)

    return sensitivity(time_us, cost_model.hardware, fraction=fraction)
