"""What a run would be on the hardware that it is meant for: time, tokens, memory. All simulated.

The dry run has a captured step and knows the whole configuration; this puts the two together: how
many tokens a step trains, what follows the graph (gradient clipping and the optimizer), and what
memory holds besides what the graph holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchtitan.distributed import ParallelDims

from gt_passes.analysis.liveness import MemoryKind
from gt_passes.simulation import (
    CostModel,
    GraphProgram,
    Hardware,
    HostModel,
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
    write_perfetto_trace,
)
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
class SimulatedRun:
    """A training step on hardware that it did not run on."""

    facts: StepFacts
    graph: StepSimulation
    """One run of the graph: forward, loss and backward of one microbatch."""

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
        microbatches = self.facts.num_microbatches
        num_gpus, speed = self.facts.num_gpus, self.tokens_per_second_per_gpu
        times = f"{microbatches} microbatches of " if microbatches > 1 else ""
        parts = (
            f"{times}{ms(graph.compute_us)} computing",
            f"{ms(graph.exposed_us)} exposed communication",
            *(
                [f"{ms(graph.copies_exposed_us)} waiting for copies"]
                * (graph.copies_exposed_us > 0)
            ),
            f"{ms(graph.host_idle_us)} waiting for the host; {ms(self.optimizer_us)} optimizer",
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
            for total in graph.by_purpose
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
            lines.append(f"  trace            {self.trace_path} (open in ui.perfetto.dev)")
        return "\n".join(lines)

    @property
    def fits(self) -> bool:
        """Whether the estimated peak is within the device's memory."""
        return self.peak_bytes <= self.graph.hardware.hbm_capacity_bytes

    def _memory_line(self) -> str:
        capacity = self.graph.hardware.hbm_capacity_bytes
        held = self.graph.memory.bytes_by_kind.items()
        parts = [(_MEMORY_LABELS[kind], num_bytes) for kind, num_bytes in held]
        parts.insert(1, ("optimizer state", self.optimizer_state_bytes))
        listed = ", ".join(
            f"{num_bytes / GIB:.2f} {kind}" for kind, num_bytes in parts if num_bytes
        )
        too_much = "" if self.fits else "; DOES NOT FIT"
        return (
            f"  peak memory      {self.peak_bytes / GIB:.2f} GiB estimated of "
            f"{capacity / GIB:.2f}{too_much}: {listed}"
        )


def simulate_run(
    traced: TracedStep,
    facts: StepFacts,
    *,
    parallel_dims: ParallelDims,
    hardware: Hardware | None = None,
    host: HostModel = "eager",
    attention_note: str | None = None,
    trace_path: Path | None = None,
) -> SimulatedRun:
    """Simulate the training step of which one microbatch was captured.

    Data-dependent sizes of token exchanges are those of balanced routing.

    Args:
        traced: the captured step, after passes.
        facts: what the configuration says of the step.
        parallel_dims: of the run, whose process groups still exist.
        hardware: the machine; H100 SXM by default.
        host: whether Python issues operator after operator, or CUDA graphs replay them.
        attention_note: as for ``SimulatedRun``.
        trace_path: where to write a Perfetto trace of the graph; None writes none.
    """
    machine = hardware or h100_sxm()
    graph_module = traced.graph_module
    sizes = SymbolSizes(balanced_exchange_sizes(graph_module))
    cost_model = CostModel(machine, sizes=sizes, host=host)
    program = GraphProgram(graph_module, cost_model)
    graph = simulate_step(
        graph_module,
        cost_model,
        group_labels=group_labels(parallel_dims),
        num_static_inputs=traced.num_static_inputs,
        program=program,
    )
    if trace_path is not None:
        write_perfetto_trace(graph, trace_path)

    def optimizer_us(on: Hardware) -> float:
        return optimizer_step_us(
            facts.num_parameters_per_rank,
            on,
            num_states=_ADAM_STATES,
            clips_gradients=facts.clips_gradients,
        )

    def step_us(on: Hardware) -> float:
        run = program.run(cost_model.with_hardware(on))
        return facts.num_microbatches * run.timeline.makespan_us + optimizer_us(on)

    moves = sensitivity(step_us, machine)
    throughput = tokens_per_second_per_gpu(
        moves.time_us, tokens=facts.tokens, num_gpus=facts.num_gpus
    )
    state_bytes = _ADAM_STATES * facts.parameter_bytes_per_rank
    accumulated = facts.parameter_bytes_per_rank if facts.num_microbatches > 1 else 0
    return SimulatedRun(
        facts=facts,
        graph=graph,
        optimizer_us=optimizer_us(machine),
        step_us=moves.time_us,
        tokens_per_second_per_gpu=throughput,
        mfu=model_flops_utilization(
            throughput, flops_per_token=facts.flops_per_token, hardware=machine
        ),
        sensitivity=moves,
        optimizer_state_bytes=state_bytes,
        peak_bytes=graph.memory.peak_bytes + state_bytes + accumulated,
        attention_note=attention_note,
        trace_path=trace_path,
    )


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
