"""The captured step of a dry run: whatever machine is to be simulated, it is captured once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gt_config.node_keys import EpExchangeAnnotation
from gt_passes import DescribeOnly
from gt_passes.simulation import Hardware, HostModel
from gt_pipeline.estimates import local_parameters
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.schedules import Schedule
from gt_trace import read_annotation
from gt_trainer.decoder.attention import DocumentCausalSDPA
from gt_trainer.dry_run.equal_stages import equal_stages
from gt_trainer.dry_run.fake_pipeline import decoder_config, place_fake_stages
from gt_trainer.dry_run.fake_step import FakeStep, MetaModel
from gt_trainer.dry_run.simulate_steps import group_labels, simulate_graphs, simulate_stages
from gt_trainer.dry_run.simulated_step import SimulatedStep
from gt_trainer.dry_run.step_facts import step_facts
from gt_trainer.pipelines.pipeline_plan import PipelinePlan
from gt_trainer.pipelines.split_model import gathered_bytes_limit
from gt_trainer.pipelines.tied_weight import tied_groups
from gt_trainer.startup import StartupClock
from gt_trainer.steps.captured_microbatches import MicrobatchProgram, microbatches
from gt_trainer.steps.captured_step import WholeStepProgram, whole_step
from gt_trainer.steps.program import (
    CaptureReport,
    ProgramToCapture,
    capture_program,
    tracing_options,
)
from gt_trainer.steps.recipe import Recipe
from gt_trainer.trainer import GraphTrainer, input_preparers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedDryStep:
    """The graphs of a step after passes, and all that a simulation of them needs."""

    config: GraphTrainer.Config
    built: MetaModel
    """The model; placed if there is no pipeline."""

    reports: tuple[CaptureReport[Any], ...]
    """Report of each capture: of the step, or of each distinct stage of a pipeline."""

    capture_seconds: float
    passes_seconds: float
    plan: PipelinePlan | None = None
    """The pipeline; None without one."""

    stages: tuple[GraphPipelineStage, ...] = ()
    """For each stage of a pipeline the one that was captured for it; equal stages share one."""

    @property
    def captured(self) -> tuple[GraphPipelineStage, ...]:
        """Each distinct stage once."""
        return tuple(dict.fromkeys(self.stages))

    @property
    def stored(self) -> list[list[torch.Tensor]]:
        """Parameters that a rank of each place in the pipeline stores."""
        if self.plan is not None:
            return parameters_by_rank(self.stages, self.plan.schedule)
        parameters = self.built.model.parameters()
        return [[p.to_local() if isinstance(p, DTensor) else p for p in parameters]]

    def simulate(
        self,
        hardware: Hardware | None,
        *,
        trace_path: Path | None = None,
        page_path: Path | None = None,
    ) -> SimulatedStep:
        """Simulate the step on a machine; within the fake ranks of the capture.

        Args:
            hardware: H100 SXM if None.
            trace_path: path of a Perfetto trace; None writes none.
            page_path: path of an HTML page of a pipeline's ranks; None writes none.
        """
        config, dims = self.config, self.built.parallel_dims
        fullest = max(self.stored, key=lambda each: sum(p.numel() for p in each))
        facts = step_facts(config, self.built, fullest)
        if self.plan is None:
            (report,) = self.reports
            return simulate_graphs(
                report.program.graphs,
                facts,
                labels=group_labels(dims),
                hardware=hardware,
                host=_host(config, report),
                attention_note=_attention_note(self.built.model),
                trace_path=trace_path,
            )
        assert config.model_spec is not None
        return simulate_stages(
            self.stages,
            self.plan.schedule,
            facts,
            labels=group_labels(dims),
            hardware=hardware,
            host="cuda_graph" if config.compile.cuda_graphs else "eager",
            max_unsharded_bytes=gathered_bytes_limit(config.compile),
            shared_groups=tied_groups(config.model_spec.model),
            trace_path=trace_path,
            page_path=page_path,
        )


def capture_dry_step(config: GraphTrainer.Config, step: FakeStep) -> CapturedDryStep:
    """Capture the step of ``config`` and run its passes; within fake ranks.

    Args:
        config: a finished configuration that ``preflight`` accepts, without a pipeline.
        step: of ``config``.

    Raises:
        Exception: whatever capturing raises, as in a real run.
    """
    begin, clock = time.perf_counter(), StartupClock()
    asked: ProgramToCapture[Any] = step_program(
        config, step, num_microbatches=step_facts(config, step, ()).num_microbatches
    )
    recipe = Recipe(
        options=config.compile,
        reshard_after_forward=config.parallelism.fsdp_reshard_after_forward,
        debug_folder=Path(config.dump_folder) / "graph_passes" / "dry_run",
        compiler=DescribeOnly(),
    )
    report = capture_program(asked, recipe=recipe, clock=clock)
    passes_seconds = clock.seconds("passes")
    return CapturedDryStep(
        config=config,
        built=step,
        reports=(report,),
        capture_seconds=time.perf_counter() - begin - passes_seconds,
        passes_seconds=passes_seconds,
    )


def capture_divided(
    config: GraphTrainer.Config,
    built: MetaModel,
    plan: PipelinePlan,
    *,
    publishes_plans: bool = True,
) -> CapturedDryStep:
    """Cut, place and capture the stages of a model; within ``fake_ranks``.

    Args:
        config: as for ``place_fake_stages``.
        built: as for ``place_fake_stages``.
        plan: as for ``place_fake_stages``.
        publishes_plans: as for ``place_fake_stages``.

    Raises:
        Exception: whatever placing or capturing raises, as in a real run.
    """
    begin, clock = time.perf_counter(), StartupClock()
    like = equal_stages(plan.names_per_stage, decoder_config(config).layers)
    placed = place_fake_stages(
        config,
        built,
        plan,
        sorted(set(like)),
        compiler=DescribeOnly(),
        publishes_plans=publishes_plans,
        clock=clock,
    )
    captured: dict[int, GraphPipelineStage] = {}
    fake_mode = None
    for index, part in placed.parts.items():
        captured[index] = placed.step.capture(index, part, placed.microbatch, fake_mode)
        fake_mode = captured[index].fake_mode
    passes_seconds = clock.seconds("passes")
    return CapturedDryStep(
        config=config,
        built=built,
        reports=placed.step.reports,
        capture_seconds=time.perf_counter() - begin - passes_seconds,
        passes_seconds=passes_seconds,
        plan=plan,
        stages=tuple(captured[index] for index in like),
    )


def parameters_by_rank(
    stages: Sequence[GraphPipelineStage], schedule: Schedule
) -> list[list[torch.Tensor]]:
    """Return the trained parameters that a rank of each place in the pipeline stores."""
    return [
        [p for index in schedule.stages_of_rank(rank) for p in local_parameters(stages[index])]
        for rank in range(schedule.num_ranks)
    ]


def step_program(
    config: GraphTrainer.Config, step: FakeStep, *, num_microbatches: int
) -> ProgramToCapture[WholeStepProgram] | ProgramToCapture[MicrobatchProgram]:
    """Return the step of ``config`` with its loss inside, as a program to capture.

    Args:
        config: As for ``capture_dry_step``.
        step: The step of ``config``.
        num_microbatches: Number in a step of this rank.
    """
    tracing = tracing_options(
        config.compile, input_preparers=input_preparers_of(config), meta_device=step.meta_device
    )
    arguments = (step.model, step.loss_fn, *step.inputs)
    if config.compile.accumulation == "reduce_once":
        return microbatches(*arguments, num_microbatches=num_microbatches, options=tracing)
    return whole_step(*arguments, options=tracing)


def _host(config: GraphTrainer.Config, report: CaptureReport[Any]) -> HostModel:
    """Who launches kernels. What exchanges tokens is recorded up to the first exchange at best."""
    if not config.compile.cuda_graphs:
        return "eager"
    nodes = (node for each in report.graph_modules for node in each.graph.nodes)
    has_exchange = any(read_annotation(node, EpExchangeAnnotation) is not None for node in nodes)
    return "eager" if has_exchange else "cuda_graph"


def _attention_note(model: nn.Module) -> str | None:
    """Return how attention was captured if that is not how a GPU computes it."""
    if not any(isinstance(module, DocumentCausalSDPA) for module in model.modules()):
        return None
    return (
        "scaled dot product with a mask, captured with the kernel of CPUs; priced as "
        "FlexAttention over a causal mask without document boundaries"
    )
