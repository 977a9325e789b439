"""What a run in pipeline stages would be on the hardware that it is meant for. All simulated.

Four levels: an operator is priced by a roofline, an action's graph runs on streams, the schedule
puts the actions of all ranks in time, and the step adds the optimizer. Each takes its tasks from
what the level below captured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gt_passes.simulation import (
    CostModel,
    Hardware,
    HostModel,
    Sensitivity,
    SymbolSizes,
    h100_sxm,
    model_flops_utilization,
    optimizer_step_us,
    sensitivity,
    tokens_per_second_per_gpu,
)
from gt_pipeline.estimates import (
    PipelineTime,
    PricedStages,
    RankMemory,
    pipeline_time,
    rank_memory,
    symbol_sizes_of,
)
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.runner.shared_parameters import find_members
from gt_pipeline.schedules import Schedule, lower, simulate, write_chrome_trace
from gt_pipeline.schedules.schedule import LoweredSchedule
from gt_pipeline.schedules.timeline_page import timelines_page
from gt_pipeline.split import SharedGroup
from gt_trainer.device_transfer import local_part
from gt_trainer.dry_run.numbers_as_text import GIB, ms
from gt_trainer.dry_run.step_facts import StepFacts
from gt_trainer.pipelines.pipeline_plan import ranks_of_pipelines

ADAM_STATES = 2
"""Tensors that the optimizer keeps for each parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPipeline:
    """A training step of a pipeline on hardware that it did not run on. Times are of one step."""

    facts: StepFacts
    hardware: Hardware
    lowered: LoweredSchedule
    """The lists of all ranks, as they were simulated."""

    time: PipelineTime
    """Of one run of the schedule, in microseconds."""

    computing_us: float
    """The compute stream was busy: the mean over pipeline ranks, as are the next two."""

    exposed_us: Mapping[str, float]
    """The compute stream stood still for a collective inside an action, by purpose; the most
    exposed first."""

    waiting_us: float
    """The compute stream stood still for the host, or for copies."""

    overlaps_gathers: bool
    """Whether UNSHARD and REDUCE_GRAD were simulated beside computation."""

    shared_us: float
    """Exchanging gradients of parameters that several ranks hold copies of, behind each run of the
    schedule: a tied weight's. What that needs of memory, once activations are gone, is no part of
    ``memory``."""

    optimizer_us: float
    """Clipping and a fused AdamW, on the rank with most parameters."""

    step_us: float
    tokens_per_second_per_gpu: float
    mfu: float
    sensitivity: Sensitivity
    memory: tuple[RankMemory, ...]
    """The peak of each pipeline rank."""

    guesses: Mapping[str, int]
    """Operators of the captured stages of which only the bytes were priced, by name."""

    assumed_symbols: tuple[str, ...]
    num_unsized: int
    trace_path: Path | None
    page_path: Path | None

    @property
    def peak_bytes(self) -> int:
        """That of the rank that needs most."""
        return max(each.peak_bytes for each in self.memory)

    @property
    def fits(self) -> bool:
        """Whether every rank is within the device's memory."""
        return self.peak_bytes <= self.hardware.hbm_capacity_bytes

    @property
    def all_exposed_us(self) -> float:
        """Communication inside of actions and between them for which computation stood still."""
        return sum(self.exposed_us.values()) + self.time.gathers + self.time.transfers

    @property
    def bubble(self) -> float:
        """The part of the step in which ranks wait for one another, apart from communication."""
        return self.facts.num_microbatches * self.time.bubble / self.step_us

    def __str__(self) -> str:
        """The run as lines for a terminal, each of them simulated or estimated."""
        times = self.facts.num_microbatches
        num_gpus, speed = self.facts.num_gpus, self.tokens_per_second_per_gpu
        of = f"{times} runs of the schedule: " if times > 1 else ""
        waiting = [f"{ms(self.waiting_us)} waiting for the host"] * (self.waiting_us >= 1)
        parts = [
            f"{ms(self.computing_us)} computing",
            f"{ms(sum(self.exposed_us.values()))} exposed inside actions",
            *waiting,
            f"{ms(self.time.gathers)} gathers and reductions",
            f"{ms(self.time.transfers)} transfers",
            f"{ms(self.time.bubble)} bubble",
            *([f"{ms(self.shared_us)} tied weight"] if self.shared_us else []),
        ]
        machine = f"{num_gpus:,} {self.hardware.name}"
        lines = [
            f"Simulated on {machine}, by a model of the hardware: nothing here was measured",
            f"  step             {ms(self.step_us)}, {self.mfu:.1%} MFU",
            f"  throughput       {speed:,.0f} tokens/s/GPU, {num_gpus * speed:,.0f} tokens/s",
            f"  made of          {of}{', '.join(parts)}; {ms(self.optimizer_us)} optimizer",
            f"  bubble           {self.bubble:.1%} of the step",
        ]
        lines += [
            f"  exposed          {ms(exposed)}: {purpose}"
            for purpose, exposed in self.exposed_us.items()
        ]
        beside = "beside computation" if self.overlaps_gathers else "the compute stream waits"
        lines.append(
            f"  exposed          {ms(self.time.gathers)}: UNSHARD and REDUCE_GRAD, {beside}"
        )
        lines.append(f"  exposed          {ms(self.time.transfers)}: transfers between stages")
        if self.shared_us:
            lines.append(f"  exposed          {ms(self.shared_us)}: gradients of the tied weight")
        lines += self._memory_lines()
        lines.append(f"  sensitivity      {self.sensitivity}")
        if self.guesses:
            listed = ", ".join(f"{count} {name}" for name, count in self.guesses.items())
            lines.append(f"  by bytes only    {listed}")
        if self.assumed_symbols:
            lines.append(
                f"  counted as 1     {len(self.assumed_symbols)} sizes that depend on data"
            )
        if self.num_unsized:
            lines.append(f"  not counted      {self.num_unsized} values of unknown size")
        if self.trace_path is not None:
            lines.append(f"  trace            {self.trace_path} (open in ui.perfetto.dev)")
        if self.page_path is not None:
            lines.append(f"  timeline         {self.page_path}")
        return "\n".join(lines)

    def _memory_lines(self) -> list[str]:
        capacity = self.hardware.hbm_capacity_bytes
        peak = f"{self.peak_bytes / GIB:.2f} GiB estimated of {capacity / GIB:.2f}"
        lines = [f"  peak memory      {peak}{'' if self.fits else '; DOES NOT FIT'}"]
        for each in self.memory:
            listed = ", ".join(
                f"{num_bytes / GIB:.2f} {part}"
                for part, num_bytes in each.bytes_by_part.items()
                if num_bytes
            )
            when = "the optimizer" if each.action is None else str(each.action)
            over = "; DOES NOT FIT" if each.peak_bytes > capacity else ""
            gib = f"{each.peak_bytes / GIB:.2f} GiB"
            lines.append(f"    rank {each.rank:<10} {gib} at {when}{over}: {listed}")
        return lines


def simulate_pipeline(
    stages: Sequence[GraphPipelineStage],
    schedule: Schedule,
    facts: StepFacts,
    *,
    labels: Mapping[str, str],
    hardware: Hardware | None = None,
    host: HostModel = "eager",
    overlap_gathers: bool = True,
    max_unsharded_bytes: int | None = None,
    shared_groups: Sequence[SharedGroup] = (),
    trace_path: Path | None = None,
    page_path: Path | None = None,
) -> SimulatedPipeline:
    """Simulate the training step of a pipeline whose stages were captured.

    Data-dependent sizes of token exchanges are those of balanced routing.

    Args:
        stages: for each stage the one that was captured for it.
        schedule: of the whole pipeline.
        facts: what the configuration says of the step; its microbatches are runs of the schedule.
        labels: what process groups are for, by their names; pipeline ranks are the outermost axis.
        hardware: the machine; H100 SXM by default.
        host: whether Python issues operator after operator, or CUDA graphs replay them.
        overlap_gathers: as for ``gt_pipeline.schedules.simulate``.
        max_unsharded_bytes: as for ``lower``.
        shared_groups: parameters that are one across stages.
        trace_path: where to write the schedule as a Perfetto trace; None writes none.
        page_path: where to write it as an HTML page; None writes none.
    """
    machine = hardware or h100_sxm()
    sizes = SymbolSizes(symbol_sizes_of(stages))
    cost_model = CostModel(machine, sizes=sizes, host=host)
    ranks, *_ = ranks_of_pipelines(schedule.num_ranks, facts.num_gpus)
    priced = PricedStages(
        stages,
        schedule,
        cost_model,
        ranks=ranks,
        group_labels=labels,
    )
    lowered = lower(
        schedule,
        unshards=True,
        reduces=True,
        max_unsharded_bytes=max_unsharded_bytes,
        unsharded_bytes={index: stage.unsharded_bytes for index, stage in enumerate(stages)},
    )
    time = pipeline_time(lowered, priced.costs(), overlap_gathers=overlap_gathers)
    most_parameters = max(
        sum(priced.memory[index].num_parameters for index in schedule.stages_of_rank(rank))
        for rank in range(schedule.num_ranks)
    )

    def optimizer_us(on: Hardware) -> float:
        return optimizer_step_us(
            most_parameters, on, num_states=ADAM_STATES, clips_gradients=facts.clips_gradients
        )

    exchanges = _exchanges(stages, shared_groups, [ranks[r] for r in schedule.stage_to_rank])

    def shared_us(model: CostModel) -> float:
        return sum(model.collective_us("all_gather", size, at) for size, at in exchanges)

    def step_us(on: Hardware) -> float:
        model = cost_model.with_hardware(on)
        run = simulate(lowered, priced.costs(model), overlap_gathers=overlap_gathers)
        return facts.num_microbatches * (run.makespan + shared_us(model)) + optimizer_us(on)

    moves = sensitivity(step_us, machine)
    throughput = tokens_per_second_per_gpu(
        moves.time_us, tokens=facts.tokens, num_gpus=facts.num_gpus
    )
    computing, exposed = _inside_actions(priced, lowered)
    if trace_path is not None:
        write_chrome_trace(time.timeline.spans, trace_path)
    if page_path is not None:
        costs = priced.costs()
        in_ms = simulate(
            lowered, lambda action: costs(action) / 1000, overlap_gathers=overlap_gathers
        )
        page_path.parent.mkdir(parents=True, exist_ok=True)
        page_path.write_text(timelines_page([in_ms]), encoding="utf-8")
    return SimulatedPipeline(
        facts=facts,
        hardware=machine,
        lowered=lowered,
        time=time,
        computing_us=computing,
        exposed_us=exposed,
        waiting_us=time.actions - computing - sum(exposed.values()),
        overlaps_gathers=overlap_gathers,
        shared_us=shared_us(cost_model),
        optimizer_us=optimizer_us(machine),
        step_us=moves.time_us,
        tokens_per_second_per_gpu=throughput,
        mfu=model_flops_utilization(
            throughput, flops_per_token=facts.flops_per_token, hardware=machine
        ),
        sensitivity=moves,
        memory=tuple(
            rank_memory(
                lowered,
                rank=rank,
                stages=priced.memory,
                pair=priced.pair_memory,
                optimizer_states=ADAM_STATES,
                accumulates=facts.num_microbatches > 1,
            )
            for rank in range(schedule.num_ranks)
        ),
        guesses=priced.guesses,
        assumed_symbols=sizes.assumed_symbols,
        num_unsized=priced.num_unsized,
        trace_path=trace_path,
        page_path=page_path,
    )


def _exchanges(
    stages: Sequence[GraphPipelineStage],
    groups: Sequence[SharedGroup],
    rank_of_stage: Sequence[int],
) -> list[tuple[int, list[int]]]:
    """What ``SharedParameter`` gathers: bytes in all, and the global ranks that hold copies."""
    # Stages that are alike share one capture, whose names are those of the stage it was made of;
    # none of them holds what is shared, for they are neither first nor last.
    members = find_members(
        groups,
        {index: tuple(stage.parameters()) for index, stage in enumerate(stages)},
        dict(enumerate(rank_of_stage)),
    )
    found = []
    for copies in members:
        of_rank = Counter(each.rank for each in copies)
        if len(of_rank) == 1:
            continue
        local = local_part(stages[copies[0].stage].parameters()[copies[0].name])
        num_bytes = local.numel() * local.element_size()
        found.append((num_bytes * len(of_rank) * max(of_rank.values()), sorted(of_rank)))
    return found


def _inside_actions(
    priced: PricedStages, lowered: LoweredSchedule
) -> tuple[float, dict[str, float]]:
    """What computations of a rank do, on average: time computing, and exposed by purpose."""
    computing = 0.0
    exposed: dict[str, float] = {}
    for actions in lowered.actions:
        for action in actions:
            if not action.is_compute:
                continue
            simulation = priced.simulation(action)
            computing += simulation.compute_us
            for total in simulation.by_purpose:
                exposed[total.purpose] = exposed.get(total.purpose, 0.0) + total.exposed_us
    ranks = lowered.num_ranks
    by_size = sorted(exposed.items(), key=lambda item: -item[1])
    return computing / ranks, {purpose: time / ranks for purpose, time in by_size}
