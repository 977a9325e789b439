"""A simulated layer drawn as bars over time: compute, token exchange, and standing still.

::

    before = layer_timeline(simulated_before, "layers.5", "forward")
    after = layer_timeline(simulated_after, "layers.5", "forward")
    print(before.text() + after.text())

Everything drawn comes from ``gt_passes.simulation``, and says so. As one HTML file:
``chunk_overlap.overlap_page``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch.fx import Node

from gt_config.node_keys import (
    ChunkAnnotation,
    Direction,
    EpExchangeAnnotation,
    FsdpCollectiveAnnotation,
)
from gt_passes.analysis.collectives import is_collective
from gt_passes.simulation import StepSimulation
from gt_passes.simulation.graph_program import COMPUTE_STREAM
from gt_trace.node_metadata import module_fqn, phase_of, read_annotation

PictureLane = Literal["compute", "token exchange", "other communication", "exposed"]

LANES: tuple[PictureLane, ...] = ("compute", "token exchange", "exposed", "other communication")
"""From the top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One task of a simulated step, or one time in which computation waits for an exchange."""

    lane: PictureLane
    start_us: float
    end_us: float
    name: str
    """The node's name, or that of the exchange that is waited for."""

    module: str
    chunk_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimeline:
    """One module in one direction, with whatever else ran at that time."""

    module: str
    direction: Direction
    hardware: str
    start_us: float
    end_us: float
    """From the start of its first task on the compute stream to the end of its last."""

    bars: tuple[Bar, ...]
    """Sorted by lane, then by time."""

    exchange_us: float
    """All token exchanges of the module in this direction."""

    exposed_us: float
    """How long computation stood still for them."""

    @property
    def hidden_us(self) -> float:
        """Exchange behind which something was computed."""
        return max(0.0, self.exchange_us - self.exposed_us)

    @property
    def caption(self) -> str:
        """What the drawing shows, in one line."""
        return (
            f"{self.module} {self.direction}, simulated on {self.hardware}: "
            f"{(self.end_us - self.start_us) / 1000:.2f} ms; token exchange "
            f"{self.exchange_us / 1000:.2f} ms, of it hidden {self.hidden_us / 1000:.2f} ms and "
            f"exposed {self.exposed_us / 1000:.2f} ms"
        )

    def text(self, *, columns: int = 100, us_per_column: float | None = None) -> str:
        """The timeline in lines for a terminal.

        Digits are chunks, ``#`` is no chunk's, ``!`` is computation that waits for an exchange.

        Args:
            columns: width of the drawing, without the names of its lanes.
            us_per_column: the scale; by default the one that fills the columns. To draw two
                timelines at one scale, take that of the longer.
        """
        scale = us_per_column or (self.end_us - self.start_us) / columns or 1.0
        lines = [self.caption]
        for lane in LANES:
            cells = "".join(self._cells(lane, scale, columns)).rstrip()
            if cells:
                lines.append(f"  {lane:<20}{cells}")
        return "\n".join(lines) + "\n"

    def _cells(self, lane: PictureLane, scale: float, columns: int) -> Iterator[str]:
        bars = [bar for bar in self.bars if bar.lane == lane]
        begin = 0
        for column in range(columns):
            low = self.start_us + column * scale
            high = min(low + scale, self.end_us)
            while begin < len(bars) and bars[begin].end_us <= low:
                begin += 1
            covered: dict[str, float] = {}
            for bar in bars[begin:]:
                if bar.start_us >= high:
                    break
                sign = _sign(bar)
                length = min(high, bar.end_us) - max(low, bar.start_us)
                covered[sign] = covered.get(sign, 0.0) + length
            # An empty cell is one that is mostly empty.
            filled = sum(covered.values()) > scale / 2
            yield max(covered, key=lambda sign: covered[sign]) if filled else " "


def layer_timeline(simulation: StepSimulation, module: str, direction: Direction) -> LayerTimeline:
    """The part of a simulated step in which a module runs forward or backward.

    Args:
        simulation: of a step, chunked or not.
        module: fully qualified name; modules inside belong to it.
        direction: the phase backward, or all that is not.

    Raises:
        ValueError: no task of the compute stream belongs to it.
    """
    run = simulation.run
    timeline = run.timeline
    own = [
        position
        for position, node in enumerate(run.nodes)
        if timeline.tasks[position].stream == COMPUTE_STREAM
        and _belongs(node, module, direction)
        # What gathers a block's parameters runs long before the block.
        and read_annotation(node, FsdpCollectiveAnnotation) is None
    ]
    if not own:
        raise ValueError(f"no node of the phase {direction} belongs to {module!r}")
    start_us = min(timeline.start_us[position] for position in own)
    end_us = max(timeline.end_us[position] for position in own)
    bars = [
        _bar(node, timeline.start_us[i], timeline.end_us[i])
        for i, node in enumerate(run.nodes)
        if timeline.start_us[i] < end_us and timeline.end_us[i] > start_us
    ]
    for stall in timeline.stalls:
        exchange = run.nodes[stall.waited_for]
        stalled_until = timeline.start_us[stall.waiting]
        if (
            stall.stream == COMPUTE_STREAM
            and _is_token_exchange(exchange)
            and start_us < stalled_until <= end_us
        ):
            begin = stalled_until - stall.duration_us
            bars.append(_bar(exchange, begin, stalled_until, lane="exposed"))
    records = [
        record
        for record, node in _records(simulation)
        if _is_token_exchange(node) and _belongs(node, module, direction)
    ]
    return LayerTimeline(
        module=module,
        direction=direction,
        hardware=simulation.hardware.name,
        start_us=start_us,
        end_us=end_us,
        bars=tuple(
            sorted(
                (bar for bar in bars if bar.end_us > bar.start_us),
                key=lambda bar: (LANES.index(bar.lane), bar.start_us),
            )
        ),
        exchange_us=sum(duration for duration, _ in records),
        exposed_us=sum(exposed for _, exposed in records),
    )


def _records(simulation: StepSimulation) -> Iterator[tuple[tuple[float, float], Node]]:
    """Duration and exposed time of every collective, with its node."""
    nodes = {node.name: node for node in simulation.run.nodes}
    for record in simulation.collectives:
        yield (record.duration_us, record.exposed_us), nodes[record.node_name]


def _belongs(node: Node, module: str, direction: Direction) -> bool:
    name = module_fqn(node)
    inside = name == module or name.startswith(f"{module}.")
    return inside and (phase_of(node) == "backward") == (direction == "backward")


def _is_token_exchange(node: Node) -> bool:
    exchange = read_annotation(node, EpExchangeAnnotation)
    return is_collective(node) and exchange is not None and exchange.kind == "token_exchange"


def _bar(node: Node, start_us: float, end_us: float, *, lane: PictureLane | None = None) -> Bar:
    if lane is None:
        if _is_token_exchange(node):
            lane = "token exchange"
        else:
            lane = "other communication" if is_collective(node) else "compute"
    chunk = read_annotation(node, ChunkAnnotation)
    fsdp = read_annotation(node, FsdpCollectiveAnnotation)
    return Bar(
        lane=lane,
        start_us=start_us,
        end_us=end_us,
        name=node.name if fsdp is None else f"{node.name} (FSDP {fsdp.kind})",
        module=module_fqn(node),
        chunk_id=None if chunk is None else chunk.chunk_id,
    )


def _sign(bar: Bar) -> str:
    if bar.lane == "exposed":
        return "!"
    return "#" if bar.chunk_id is None else str(bar.chunk_id % 10)


def common_scale(timelines: Sequence[LayerTimeline], columns: int) -> float:
    """Microseconds a column at which the longest of several timelines fills the columns."""
    return max(each.end_us - each.start_us for each in timelines) / columns or 1.0
