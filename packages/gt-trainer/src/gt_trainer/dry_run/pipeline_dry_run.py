"""The dry run of a pipeline: each distinct stage is captured once, all ranks are simulated."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gt_passes.simulation import Hardware
from gt_pipeline.estimates import local_parameters
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.schedules import Schedule
from gt_trace import flex_attention_on_cpu
from gt_trainer.dry_run.beside_by_hand import PlacedByHand
from gt_trainer.dry_run.fake_pipeline import FakePipeline, capture_divided, planned_pipeline
from gt_trainer.dry_run.fake_step import fake_ranks, meta_model
from gt_trainer.dry_run.numbers_as_text import GIB
from gt_trainer.dry_run.simulated_balance import (
    SimulatedBalance,
    simulated_balance,
    with_stages,
)
from gt_trainer.dry_run.simulated_pipeline import SimulatedPipeline, simulate_pipeline
from gt_trainer.dry_run.simulated_run import group_labels
from gt_trainer.dry_run.step_facts import degrees_of, step_facts
from gt_trainer.parallelism_options import balance_of
from gt_trainer.pipelines.split_model import gathered_bytes_limit
from gt_trainer.pipelines.tied_weight import tied_groups
from gt_trainer.placement.kept_plan import plan_file_of
from gt_trainer.steps.training_step import num_operators
from gt_trainer.trainer import GraphTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineDryRunReport:
    """What the ranks of a pipeline would hold and execute."""

    model: str
    world_size: int
    degrees: tuple[tuple[str, int], ...]
    """Mesh axes above 1, by name."""

    num_parameters: int
    """Those of the whole model; tied parameters count once."""

    parameters_by_rank: tuple[int, ...]
    """Numbers that a rank of each place in the pipeline stores, after sharding. Of a tied weight
    both copies count."""

    parameter_bytes_by_rank: tuple[int, ...]
    schedule: Schedule
    microbatch_size: int
    seq_len: int
    memory_policy: str
    captured: tuple[tuple[str, int], ...]
    """Each captured stage with the stages that it stands for, and the operators of its actions."""

    capture_seconds: float
    """Capture and passes of all of them."""

    num_stamped: int
    """Captured stages of whose layers most are stamped."""

    simulated: SimulatedPipeline
    """A training step on the hardware that the configuration is meant for."""

    balance: SimulatedBalance | None = None
    """How stages were balanced; None if by layers."""

    beside_by_hand: PlacedByHand | None = None
    """The step placed by hand, if a solver placed another and the run could be placed so."""

    placement: str | None = None
    """Which of the two a run takes, of which all the rest is; None if nobody had to choose."""

    remedy: str | None = None
    """What would make a run fit that does not; None if it fits."""

    def __str__(self) -> str:
        """The report as lines for a terminal."""
        axes = " x ".join(f"{name} {degree}" for name, degree in self.degrees)
        fewest, most = min(self.parameters_by_rank), max(self.parameters_by_rank)
        stored = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
        gib = max(self.parameter_bytes_by_rank) / GIB
        schedule, name = self.schedule, self.schedule.name
        batch = (
            f"{schedule.num_microbatches} microbatches of {self.microbatch_size} x "
            f"{self.seq_len:,} tokens"
        )
        graphs = ", ".join(f"stage {stages} {count:,}" for stages, count in self.captured)
        lines = (
            f"Dry run of {self.model} on {self.world_size:,} ranks ({axes})",
            f"  parameters       {self.num_parameters:,}",
            f"  on each rank     {stored} ({gib:.2f} GiB as stored)",
            f"  pipeline         {name}, {schedule.num_ranks} ranks, {schedule.num_stages} stages",
            f"  batch            {batch}, {self.simulated.facts.tokens:,} a step",
            f"  memory policy    {self.memory_policy}",
            f"  operators        {graphs}",
            f"  capture          {self.capture_seconds:.1f} s, passes included; {self._distinct}",
            *([] if self.balance is None else [str(self.balance)]),
            str(self.simulated),
            *([f"  to make it fit   {self.remedy}"] if self.remedy else []),
            *([str(self.beside_by_hand)] if self.beside_by_hand else []),
            *([f"  {self.placement}"] if self.placement else []),
        )
        return "\n".join(lines)

    @property
    def _distinct(self) -> str:
        distinct = f"{len(self.captured)} stages stand for all {self.schedule.num_stages}"
        stamped = f", {self.num_stamped} with stamped layers" if self.num_stamped else ""
        return distinct + stamped


def pipeline_dry_run(
    config: GraphTrainer.Config,
    world_size: int,
    *,
    hardware: Hardware | None = None,
    overlap_gathers: bool = True,
    trace_path: Path | None = None,
    timeline_path: Path | None = None,
) -> PipelineDryRunReport:
    """Check that a pipeline can be built, placed and captured, and simulate its step.

    Args:
        config: a finished configuration that ``preflight`` accepts; its pipeline degree is 2 or
            more.
        world_size: number of ranks; none of them is started.
        hardware: the machine to simulate; H100 SXM by default.
        overlap_gathers: whether UNSHARD and REDUCE_GRAD run beside computation, as they do in a
            run; False tells what that gains.
        trace_path: where to write the simulated schedule as a Perfetto trace; None writes none.
        timeline_path: where to write it as an HTML page; None writes none.

    Raises:
        RuntimeError: a process group exists already.
        Exception: whatever building, placing or capturing raises, as in a real run.
    """
    spec = config.model_spec
    assert spec is not None
    with fake_ranks(world_size), flex_attention_on_cpu():
        # One model: two meshes of the same ranks are one for DTensor, with the groups of either.
        built = meta_model(config, world_size)
        balance = None
        is_balanced = balance_of(config.parallelism) != "layers"
        if is_balanced and (path := plan_file_of(config)) is not None:
            # Imported here: no other dry run pays for the solver.
            from gt_trainer.pipelines.planned_stages import stages_of_plan

            config = with_stages(config, stages_of_plan(path))
        elif is_balanced:
            balance = simulated_balance(config, built, hardware=hardware)
            config = with_stages(config, balance.names_per_stage)
        begin = time.perf_counter()
        pipeline = capture_divided(config, built, planned_pipeline(config))
        seconds = time.perf_counter() - begin
        schedule = pipeline.plan.schedule
        stored = parameters_by_rank(pipeline.stages, schedule)
        simulated = simulate_captured(
            config,
            pipeline,
            hardware=hardware,
            overlap_gathers=overlap_gathers,
            trace_path=trace_path,
            timeline_path=timeline_path,
        )
        return PipelineDryRunReport(
            model=f"{spec.name} {spec.flavor}",
            world_size=world_size,
            degrees=degrees_of(pipeline.parallel_dims),
            num_parameters=pipeline.num_parameters,
            parameters_by_rank=tuple(sum(p.numel() for p in each) for each in stored),
            parameter_bytes_by_rank=tuple(
                sum(p.numel() * p.element_size() for p in each) for each in stored
            ),
            schedule=schedule,
            microbatch_size=config.parallelism.pipeline_parallel_microbatch_size,
            seq_len=config.training.seq_len,
            memory_policy=config.compile.memory_policy,
            captured=tuple(_described(pipeline)),
            capture_seconds=seconds,
            num_stamped=sum(
                each.stamping is not None and each.stamping.stamped for each in pipeline.reports
            ),
            simulated=simulated,
            balance=balance,
        )


def parameters_by_rank(
    stages: Sequence[GraphPipelineStage], schedule: Schedule
) -> list[list[torch.Tensor]]:
    """Parameters that a rank of each place in the pipeline stores."""
    return [
        [
            local
            for index in schedule.stages_of_rank(rank)
            for local in local_parameters(stages[index])
        ]
        for rank in range(schedule.num_ranks)
    ]


def simulate_captured(
    config: GraphTrainer.Config,
    pipeline: FakePipeline,
    *,
    hardware: Hardware | None,
    overlap_gathers: bool = True,
    trace_path: Path | None = None,
    timeline_path: Path | None = None,
) -> SimulatedPipeline:
    """Simulate the step of a captured pipeline; within the fake ranks of its capture.

    Args:
        config: says which schedule runs, and how; ``pipeline.plan`` is its.
        pipeline: captured for it, or for another schedule of the same stages.
        hardware: as for ``pipeline_dry_run``, as are the rest.
        overlap_gathers: see ``hardware``.
        trace_path: see ``hardware``.
        timeline_path: see ``hardware``.
    """
    spec = config.model_spec
    assert spec is not None
    schedule = pipeline.plan.schedule
    stored = parameters_by_rank(pipeline.stages, schedule)
    facts = step_facts(
        config,
        pipeline.parallel_dims,
        max(stored, key=lambda each: sum(p.numel() for p in each)),
        flops_per_token=pipeline.flops_per_token,
    )
    return simulate_pipeline(
        pipeline.stages,
        schedule,
        facts,
        labels=group_labels(pipeline.parallel_dims),
        hardware=hardware,
        host="cuda_graph" if config.compile.cuda_graphs else "eager",
        overlap_gathers=overlap_gathers,
        max_unsharded_bytes=gathered_bytes_limit(config.compile),
        shared_groups=tied_groups(spec.model),
        trace_path=trace_path,
        page_path=timeline_path,
    )


def _described(pipeline: FakePipeline) -> list[tuple[str, int]]:
    found = []
    for captured in pipeline.captured:
        stands_for = [i for i, stage in enumerate(pipeline.stages) if stage is captured]
        first, last = stands_for[0], stands_for[-1]
        is_range = len(stands_for) > 1 and stands_for == list(range(first, last + 1))
        name = f"{first}-{last}" if is_range else " and ".join(map(str, stands_for))
        graphs = captured.actions.values()
        found.append((name, sum(num_operators(each.graph_module) for each in graphs)))
    return found
