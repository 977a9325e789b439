"""The captured step of a dry run: whatever machine is to be simulated, it is captured once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims

from gt_config.node_keys import EpExchangeAnnotation
from gt_passes import DescribeOnly
from gt_passes.simulation import Hardware, HostModel
from gt_pipeline.graph import AccumulationGraphs
from gt_trace import TracedStep, read_annotation
from gt_trainer.decoder.attention import DocumentCausalSDPA
from gt_trainer.dry_run.fake_step import FakeStep
from gt_trainer.dry_run.simulated_run import SimulatedRun, group_labels, simulate_run
from gt_trainer.dry_run.step_facts import StepFacts, step_facts
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
    """The graphs of a step after passes, and all that a simulation asks beside them."""

    report: CaptureReport[WholeStepProgram] | CaptureReport[MicrobatchProgram]
    stored: Sequence[torch.Tensor]
    """Parameters as this rank stores them."""

    facts: StepFacts
    parallel_dims: ParallelDims
    host: HostModel
    attention_note: str | None

    def simulate(
        self, hardware: Hardware | None, *, trace_path: Path | None = None
    ) -> SimulatedRun:
        """The step on a machine; within the fake ranks of the capture.

        Args:
            hardware: H100 SXM if None.
            trace_path: where to write a Perfetto trace; None writes none.
        """
        return simulate_run(
            self.report.program.captured,
            self.facts,
            labels=group_labels(self.parallel_dims),
            hardware=hardware,
            host=self.host,
            attention_note=self.attention_note,
            trace_path=trace_path,
        )


def capture_dry_step(
    config: GraphTrainer.Config, step: FakeStep, clock: StartupClock
) -> CapturedDryStep:
    """Capture the step of ``config`` and run its passes; within fake ranks.

    Args:
        config: a finished configuration that ``preflight`` accepts, without a pipeline.
        step: of ``config``.
        clock: Counts capture and passes.

    Raises:
        Exception: whatever capturing raises, as in a real run.
    """
    stored = [p.to_local() if isinstance(p, DTensor) else p for p in step.model.parameters()]
    facts = step_facts(config, step.parallel_dims, stored, flops_per_token=step.flops_per_token)
    asked: ProgramToCapture[Any] = step_program(
        config, step, num_microbatches=facts.num_microbatches
    )
    recipe = Recipe(
        options=config.compile,
        reshard_after_forward=config.parallelism.fsdp_reshard_after_forward,
        debug_folder=Path(config.dump_folder) / "graph_passes" / "dry_run",
        compiler=DescribeOnly(),
    )
    report = capture_program(asked, recipe=recipe, clock=clock)
    return CapturedDryStep(
        report=report,
        stored=stored,
        facts=facts,
        parallel_dims=step.parallel_dims,
        host=_host(config, report.program.captured),
        attention_note=_attention_note(step.model),
    )


def _host(config: GraphTrainer.Config, captured: TracedStep | AccumulationGraphs) -> HostModel:
    """Who launches kernels. What exchanges tokens is recorded up to the first exchange at best."""
    if not config.compile.cuda_graphs:
        return "eager"
    graphs = [captured] if isinstance(captured, TracedStep) else captured.graphs
    nodes = (node for each in graphs for node in each.graph_module.graph.nodes)
    has_exchange = any(read_annotation(node, EpExchangeAnnotation) is not None for node in nodes)
    return "eager" if has_exchange else "cuda_graph"


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


def _attention_note(model: nn.Module) -> str | None:
    """Return how attention was captured if that is not how a GPU computes it."""
    if not any(isinstance(module, DocumentCausalSDPA) for module in model.modules()):
        return None
    return (
        "scaled dot product with a mask, captured with the kernel of CPUs; priced as "
        "FlexAttention over a causal mask without document boundaries"
    )
