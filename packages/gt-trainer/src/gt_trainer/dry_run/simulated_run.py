"""What a run would be on the hardware that it is meant for: time, tokens, memory. All simulated.

The dry run has a captured step and knows the whole configuration; this puts the two together: how
many tokens a step trains, what follows the graph (gradient clipping and the optimizer), and what
memory holds besides what the graph holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch.fx import GraphModule, Node
from torchtitan.distributed import ParallelDims

from gt_passes.analysis.liveness import MemoryKind
from gt_passes.simulation import (
    CostModel,
    GraphProgram,
    Hardware,
    HostModel,
    PurposeTotal,
    Sensitivity,
    StepSimulation,
    SymbolSizes,
    balanced_exchange_sizes,
    h100_sxm,
    model_flops_utilization,
    optimizer_step_us,
    sensitivity,
    simulate_step,
    tokens_per_second_per_gpu,
    totals_by_purpose,
    write_perfetto_trace,
)
from gt_pipeline.graph import AccumulationGraphs
from gt_trace import TracedStep
from gt_trainer.dry_run.numbers_as_text import GIB, ms
from gt_trainer.dry_run.step_facts import StepFacts

_ADAM_STATES = 2
_MEMORY_LABELS: Mapping[MemoryKind, str] = {
    "static inputs": "parameters and buffers",
    "arguments": "batch",
    "outputs": "gradients",
    "gathered parameters": "gathered parameters",
    "saved for backward": "activations",
    "temporaries": "temporaries",
}
_AXIS_LABELS = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "fsdp": "data parallel",
    "dp_shard": "data parallel",
    "dp_replicate": "data parallel (replicas)",
    "efsdp": "data parallel (experts)",
    "pp": "pipeline",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRuns:
    """A graph of a step, and how often one step runs it."""

    graph: StepSimulation
    """Forward, loss and backward of one microbatch."""

    graph_module: GraphModule
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A training step on hardware that it did not run on."""

    facts: StepFacts
    runs: tuple[GraphRuns, ...]
    """One graph for all microbatches, or several where they share gathering and reduction."""

    optimizer_us: float
    """Clipping and a fused AdamW."""

    step_us: float
    """All microbatches and the optimizer."""

    tokens_per_second_per_gpu: float
    mfu: float
    """Fraction of the bf16 peak, by torchtitan's count of FLOPs."""

    sensitivity: Sensitivity
    """What ``step_us`` would be with other constants."""

    optimizer_state_bytes: int
    peak_bytes: int
    """What one rank needs: the graph's peak, the optimizer's state, accumulated gradients."""

    attention_note: str | None
    """What to know of how attention was captured; None if as it would run."""

    trace_path: Path | None
    """Where a Perfetto trace of the graph was written."""

    def __str__(self) -> str:
        """The run as lines for a terminal, each of them simulated or estimated."""
        graph, machine = self.graph, f"{self.facts.num_gpus:,} {self.graph.hardware.name}"
        num_gpus, speed = self.facts.num_gpus, self.tokens_per_second_per_gpu
        copies_us = self._total(lambda graph: graph.copies_exposed_us)
        host_us = self._total(lambda graph: graph.host_idle_us)
        slowed_us = self._total(lambda graph: graph.slowed_us)
        slowed = f" ({ms(slowed_us)} of it slowed by collectives)" if slowed_us else ""
        parts = (
            *([self._microbatches()] * (self.facts.num_microbatches > 1)),
            f"{ms(self._total(lambda graph: graph.compute_us))} computing{slowed}",
            f"{ms(self.exposed_us)} exposed communication",
            *([f"{ms(copies_us)} waiting for copies"] * (copies_us > 0)),
            f"{ms(host_us)} waiting for the host; {ms(self.optimizer_us)} optimizer",
        )
        lines = [
            f"Simulated on {machine}, by a model of the hardware: nothing here was measured",
            f"  step             {ms(self.step_us)}, {self.mfu:.1%} MFU",
            f"  throughput       {speed:,.0f} tokens/s/GPU, {num_gpus * speed:,.0f} tokens/s",
            f"  made of          {', '.join(parts)}",
        ]
        lines += [
            f"  exposed          {ms(total.exposed_us)} of {ms(total.duration_us)}: "
            f"{total.count} {total.purpose}"
            for total in self.by_purpose
        ]
        lines.append(self._memory_line())
        lines.append(f"  sensitivity      {self.sensitivity}")
        if graph.guesses:
            listed = ", ".join(f"{count} {name}" for name, count in graph.guesses.items())
            lines.append(f"  by bytes only    {listed}")
        if graph.assumed_symbols:
            lines.append(
                f"  counted as 1     {len(graph.assumed_symbols)} sizes that depend on data"
            )
        if self.attention_note:
            lines.append(f"  attention        {self.attention_note}")
        if self.trace_path is not None:
            which = "the microbatch that needs most memory; " if len(self.runs) > 1 else ""
            lines.append(f"  trace            {self.trace_path} ({which}open in ui.perfetto.dev)")
        return "\n".join(lines)

    def _microbatches(self) -> str:
        share = " that gather and reduce once" if len(self.runs) > 1 else ""
        return f"{self.facts.num_microbatches} microbatches{share}"

    @property
    def graph(self) -> StepSimulation:
        """The graph that needs the most memory, or the only one."""
        return max((each.graph for each in self.runs), key=lambda graph: graph.memory.peak_bytes)

    @property
    def by_purpose(self) -> tuple[PurposeTotal, ...]:
        """Collectives of a step by purpose, the most exposed first."""
        return totals_by_purpose([r for e in self.runs for r in e.graph.collectives * e.count])

    @property
    def exposed_us(self) -> float:
        """How long the compute stream stands still for collectives, in a step."""
        return self._total(lambda graph: graph.exposed_us)

    def _total(self, part: Callable[[StepSimulation], float]) -> float:
        return sum(each.count * part(each.graph) for each in self.runs)

    @property
    def fits(self) -> bool:
        """Whether the estimated peak is within the device's memory."""
        return self.peak_bytes <= self.graph.hardware.hbm_capacity_bytes

    @property
    def memory_by_kind(self) -> dict[str, int]:
        """What a rank holds at the peak; the values add up to ``peak_bytes``."""
        return self.held_with(self.graph.memory.bytes_by_kind)

    def held_with(self, in_graph: Mapping[MemoryKind, int]) -> dict[str, int]:
        """What a rank holds when its graph holds this much, in bytes."""
        state = self.optimizer_state_bytes
        accumulated = self.peak_bytes - self.graph.memory.peak_bytes - state
        parts = [(_MEMORY_LABELS[kind], num_bytes) for kind, num_bytes in in_graph.items()]
        parts[1:1] = [("optimizer state", state), ("accumulated gradients", accumulated)]
        return dict(parts)

    def _memory_line(self) -> str:
        capacity = self.graph.hardware.hbm_capacity_bytes
        held = self.memory_by_kind.items()
        listed = ", ".join(f"{num_bytes / GIB:.2f} {kind}" for kind, num_bytes in held if num_bytes)
        too_much = "" if self.fits else "; DOES NOT FIT"
        return (
            f"  peak memory      {self.peak_bytes / GIB:.2f} GiB estimated of "
            f"{capacity / GIB:.2f}{too_much}: {listed}"
        )


def simulate_run(
    captured: TracedStep | AccumulationGraphs,
    facts: StepFacts,
    *,
    labels: Mapping[str, str],
    hardware: Hardware | None = None,
    host: HostModel = "eager",
    attention_note: str | None = None,
    trace_path: Path | None = None,
) -> SimulatedRun:
    """Simulate the training step of which microbatches were captured.

    Data-dependent sizes of token exchanges are those of balanced routing.

    Args:
        captured: one microbatch, for all alike, or those that share; after passes.
        facts: what the configuration says of the step.
        labels: what process groups are for, by name, as of ``group_labels``.
        hardware: the machine; H100 SXM by default.
        host: whether Python issues operator after operator, or CUDA graphs replay them.
        attention_note: as for ``SimulatedRun``.
        trace_path: where to write a Perfetto trace of a graph; None writes none.
    """
    machine = hardware or h100_sxm()
    priced = [_priced(each, machine=machine, host=host) for each in _graphs_of(captured, facts)]
    runs = tuple(
        GraphRuns(
            graph=simulate_step(
                each.graph_module,
                cost_model,
                group_labels=labels,
                num_static_inputs=each.num_static_inputs,
                released_inputs=each.released_inputs,
                input_kinds=each.input_kinds,
                program=program,
            ),
            graph_module=each.graph_module,
            count=each.count,
        )
        for each, cost_model, program in priced
    )

    def optimizer_us(on: Hardware) -> float:
        return optimizer_step_us(
            facts.num_parameters_per_rank,
            on,
            num_states=_ADAM_STATES,
            clips_gradients=facts.clips_gradients,
        )

    def step_us(on: Hardware) -> float:
        graphs_us = sum(
            each.count * program.run(cost_model.with_hardware(on)).timeline.makespan_us
            for each, cost_model, program in priced
        )
        return graphs_us + optimizer_us(on)

    moves = sensitivity(step_us, machine)
    throughput = tokens_per_second_per_gpu(
        moves.time_us, tokens=facts.tokens, num_gpus=facts.num_gpus
    )
    state_bytes = _ADAM_STATES * facts.parameter_bytes_per_rank
    # Microbatches that share have their sums in their graphs.
    is_added = facts.num_microbatches > 1 and isinstance(captured, TracedStep)
    accumulated = facts.parameter_bytes_per_rank if is_added else 0
    found = SimulatedRun(
        facts=facts,
        runs=runs,
        optimizer_us=optimizer_us(machine),
        step_us=moves.time_us,
        tokens_per_second_per_gpu=throughput,
        mfu=model_flops_utilization(
            throughput, flops_per_token=facts.flops_per_token, hardware=machine
        ),
        sensitivity=moves,
        optimizer_state_bytes=state_bytes,
        peak_bytes=max(each.graph.memory.peak_bytes for each in runs) + state_bytes + accumulated,
        attention_note=attention_note,
        trace_path=trace_path,
    )
    if trace_path is not None:
        write_perfetto_trace(found.graph, trace_path)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepGraph:
    graph_module: GraphModule
    count: int
    num_static_inputs: int
    released_inputs: tuple[Node, ...] = ()
    input_kinds: Mapping[Node, MemoryKind] = field(default_factory=dict)


def _graphs_of(captured: TracedStep | AccumulationGraphs, facts: StepFacts) -> Iterator[_StepGraph]:
    """The graphs of a step, and how often each of them runs."""
    if isinstance(captured, TracedStep):
        yield _StepGraph(
            graph_module=captured.graph_module,
            count=facts.num_microbatches,
            num_static_inputs=captured.num_static_inputs,
        )
        return
    for each in captured.graphs:
        yield _StepGraph(
            graph_module=each.graph_module,
            count=facts.num_microbatches - 2 if each.role == "further" else 1,
            num_static_inputs=captured.traced.num_static_inputs,
            released_inputs=each.released_inputs,
            input_kinds=each.input_kinds,
        )


def _priced(
    step_graph: _StepGraph, *, machine: Hardware, host: HostModel
) -> tuple[_StepGraph, CostModel, GraphProgram]:
    sizes = SymbolSizes(balanced_exchange_sizes(step_graph.graph_module))
    cost_model = CostModel(machine, sizes=sizes, host=host)
    return step_graph, cost_model, GraphProgram(step_graph.graph_module, cost_model)


def group_labels(parallel_dims: ParallelDims) -> dict[str, str]:
    """What the mesh axes on each process group are for. Axes over the same ranks share one."""
    labels: dict[str, str] = {}
    for axis, mesh in parallel_dims.get_all_one_dimensional_meshes().items():
        label = _AXIS_LABELS.get(axis)
        if label is None:
            continue
        name = mesh.get_group().group_name
        labels[name] = f"{labels[name]}, {label}" if name in labels else label
    return labels
