"""What a simulated step tells: its time, the communication that nothing hides, and where it is.

Everything here is simulated, and every text that comes out of it says so.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch.fx import GraphModule, Node

from gt_config.node_keys import CpCollectiveAnnotation, EpExchangeAnnotation
from gt_passes.analysis.fsdp_collective import fsdp_collective
from gt_passes.analysis.liveness import (
    CUDA_BLOCK_BYTES,
    MemoryKind,
    MemoryProfile,
    estimate_memory,
)
from gt_passes.analysis.outlined_region import only_region
from gt_passes.simulation.collective_model import CollectiveKind
from gt_passes.simulation.cost_model import CostModel
from gt_passes.simulation.graph_program import COMPUTE_STREAM, GraphProgram, GraphRun
from gt_passes.simulation.hardware import Hardware
from gt_trace.node_metadata import module_fqn, read_annotation

_NO_KINDS: Mapping[Node, MemoryKind] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRecord:
    """One collective of a simulated step."""

    node_name: str
    kind: CollectiveKind
    purpose: str
    """FSDP unshard, FSDP reduce_grad, CP gather, CP reduce_grad, EP token exchange, or the label of
    its group."""

    group_name: str
    module: str
    """Fully qualified name of the module that it belongs to; empty for none."""

    num_bytes: int
    start_us: float
    duration_us: float
    exposed_us: float
    """How long the compute stream stood still for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PurposeTotal:
    """All collectives of one purpose."""

    purpose: str
    count: float
    """A whole number, unless it is a mean over ranks. So are the bytes."""

    num_bytes: float
    duration_us: float
    exposed_us: float


def totals_by_purpose(
    runs: Iterable[tuple[Sequence[CollectiveRecord], float]],
) -> tuple[PurposeTotal, ...]:
    """Return the totals of collectives by purpose, the most exposed first.

    Args:
        runs: the collectives of each graph, and the number of times that it runs.
    """
    found: dict[str, PurposeTotal] = {}
    for collectives, times in runs:
        for record in collectives:
            before = found.get(record.purpose)
            found[record.purpose] = PurposeTotal(
                purpose=record.purpose,
                count=(before.count if before else 0) + times,
                num_bytes=(before.num_bytes if before else 0) + times * record.num_bytes,
                duration_us=(before.duration_us if before else 0.0) + times * record.duration_us,
                exposed_us=(before.exposed_us if before else 0.0) + times * record.exposed_us,
            )
    return tuple(sorted(found.values(), key=lambda total: (-total.exposed_us, total.purpose)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSimulation:
    """A training step on a machine that nobody ran it on.

    ``step_us`` is the sum of ``compute_us``, ``exposed_us``, ``copies_exposed_us`` and
    ``host_idle_us``, where the compute stream ends last.
    """

    hardware: Hardware
    run: GraphRun
    step_us: float
    compute_us: float
    """The compute stream was busy."""

    slowed_us: float
    """Of that: what collectives beside it took of the device."""

    exposed_us: float
    """The compute stream stood still for a collective."""

    copies_exposed_us: float
    """The compute stream stood still for a copy from the host, or to it."""

    host_idle_us: float
    """The compute stream stood still for the host."""

    flops: int
    """Those of matrix products and attention, recomputation and masked pairs included."""

    collectives: tuple[CollectiveRecord, ...]
    """In the order of their launches."""

    guesses: Mapping[str, int]
    """Operators of which only the bytes were priced, by name, with how many there are."""

    assumed_symbols: tuple[str, ...]
    """Data-dependent sizes for which nothing was known; they count as 1."""

    memory: MemoryProfile
    """Estimated, of the graph alone: an optimizer's state outside it is not in it."""

    memory_at_us: tuple[float, ...]
    """When each of the nodes runs for which ``memory`` tells what is held."""

    @property
    def by_purpose(self) -> tuple[PurposeTotal, ...]:
        """Collectives by purpose, the most exposed first."""
        return totals_by_purpose([(self.collectives, 1)])

    def _copy_lines(self) -> list[str]:
        copied = [cost for cost in self.run.costs if cost.kind == "host_copy"]
        if not copied:
            return []
        gib = sum(cost.moved_bytes for cost in copied) / 2**30
        what = f"{len(copied)} to and from the host, {gib:.2f} GiB"
        return [f"  waiting for copies      {_ms(self.copies_exposed_us)} ({what})"]

    def table(self) -> str:
        """The step in lines for a terminal."""
        lines = [
            f"Simulated on {self.hardware.name} (no clock was read)",
            f"  step                    {_ms(self.step_us)}",
            f"  compute stream busy     {_ms(self.compute_us)}",
            f"    slowed by collectives {_ms(self.slowed_us)}",
            f"  exposed communication   {_ms(self.exposed_us)}",
            f"  waiting for the host    {_ms(self.host_idle_us)}",
            *self._copy_lines(),
            f"  peak memory (graph)     {self.memory.peak_bytes / 2**30:,.2f} GiB estimated",
        ]
        if self.collectives:
            lines.append(f"  {'collectives':<26}{'count':>6}{'GiB':>9}{'time':>12}{'exposed':>12}")
        lines += [
            f"    {total.purpose:<24}{total.count:>6}{total.num_bytes / 2**30:>9.2f}"
            f"{_ms(total.duration_us):>12}{_ms(total.exposed_us):>12}"
            for total in self.by_purpose
        ]
        if self.guesses:
            listed = ", ".join(f"{count} {name}" for name, count in self.guesses.items())
            lines.append(f"  priced by bytes only    {listed}")
        if self.assumed_symbols:
            lines.append(
                f"  sizes counted as 1      {len(self.assumed_symbols)} data-dependent symbols, "
                f"such as {self.assumed_symbols[0]}"
            )
        return "\n".join(lines)


def simulate_step(
    graph_module: GraphModule,
    cost_model: CostModel,
    *,
    group_labels: Mapping[str, str] | None = None,
    num_static_inputs: int = 0,
    released_inputs: Collection[Node] = (),
    input_kinds: Mapping[Node, MemoryKind] = _NO_KINDS,
    program: GraphProgram | None = None,
) -> StepSimulation:
    """Simulate one run of a captured graph on one rank, all ranks being alike.

    Args:
        graph_module: a captured graph with recorded values.
        cost_model: prices its nodes.
        group_labels: by the name of a process group, what its collectives are for, where no
            annotation says it (``{"3": "tensor parallel"}``).
        num_static_inputs: how many leading placeholders hold parameters and buffers.
        released_inputs: as for ``estimate_memory``.
        input_kinds: as for ``estimate_memory``.
        program: of the same graph, if it has been read already.

    Raises:
        UnknownProcessGroupError: a collective over a group whose ranks are unknown.
        UnknownCollectiveError: a collective of an unknown kind.
    """
    if program is None:
        program = GraphProgram(graph_module, cost_model)
    run = program.run(cost_model)
    timeline = run.timeline
    exposed: dict[int, float] = {}
    for stall in timeline.stalls:
        if stall.stream == COMPUTE_STREAM:
            exposed[stall.waited_for] = exposed.get(stall.waited_for, 0.0) + stall.duration_us
    collectives = []
    for position, (node, cost) in enumerate(zip(run.nodes, run.costs, strict=True)):
        launch = cost.collective
        if launch is None:
            continue
        collectives.append(
            CollectiveRecord(
                node_name=node.name,
                kind=launch.kind,
                purpose=_purpose(node, launch.group_name, group_labels or {}),
                group_name=launch.group_name,
                module=module_fqn(node),
                num_bytes=launch.num_bytes,
                start_us=timeline.start_us[position],
                duration_us=cost.duration_us,
                exposed_us=exposed.get(position, 0.0),
            )
        )
    guesses = Counter(
        str(node.target) for node, cost in zip(run.nodes, run.costs, strict=True) if cost.is_guess
    )
    region = only_region(graph_module)
    with_memory = graph_module if region is None else region.body
    return StepSimulation(
        hardware=cost_model.hardware,
        run=run,
        step_us=timeline.makespan_us,
        compute_us=timeline.busy_us(COMPUTE_STREAM),
        slowed_us=timeline.slowed_us.get(COMPUTE_STREAM, 0.0),
        exposed_us=sum(record.exposed_us for record in collectives),
        copies_exposed_us=sum(
            stalled for task, stalled in exposed.items() if run.costs[task].kind == "host_copy"
        ),
        host_idle_us=timeline.host_idle_us.get(COMPUTE_STREAM, 0.0),
        flops=sum(cost.flops for cost in run.costs),
        collectives=tuple(collectives),
        guesses=MappingProxyType(dict(guesses)),
        assumed_symbols=cost_model.sizes.assumed_symbols,
        memory=estimate_memory(
            with_memory,
            num_static_inputs=num_static_inputs,
            released_inputs=released_inputs,
            input_kinds=input_kinds,
            block_bytes=CUDA_BLOCK_BYTES,
            symbol_sizes=cost_model.sizes.sizes,
        ),
        memory_at_us=_times_of_nodes(with_memory, run),
    )


def _times_of_nodes(graph_module: GraphModule, run: GraphRun) -> tuple[float, ...]:
    """When the compute stream comes to each node; what is no task goes with the one before it."""
    starts: dict[Node, float] = {}
    timeline = run.timeline
    for nodes in (run.graph_nodes, run.nodes):
        for node, task, start in zip(nodes, timeline.tasks, timeline.start_us, strict=True):
            if task.stream == COMPUTE_STREAM:
                starts.setdefault(node, start)
    in_order = (starts.get(node, 0.0) for node in graph_module.graph.nodes)
    return tuple(itertools.accumulate(in_order, max))


def _purpose(node: Node, group_name: str, labels: Mapping[str, str]) -> str:
    fsdp = fsdp_collective(node)
    if fsdp is not None:
        return f"FSDP {fsdp.kind}"
    cp = read_annotation(node, CpCollectiveAnnotation)
    if cp is not None:
        return f"CP {cp.kind}"
    exchange = read_annotation(node, EpExchangeAnnotation)
    if exchange is not None:
        return f"EP {exchange.kind.replace('_', ' ')}"
    return labels.get(group_name, f"group {group_name}")


def _ms(time_us: float) -> str:
    return f"{time_us / 1000:,.2f} ms"
