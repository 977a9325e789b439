"""Simulates the steps of plans, so that the fastest is taken and not the cheapest by prices alone.

Each plan gets a separate model on meta. It is placed, captured, and put through the recipe of
``config_for_judging``, on the fake ranks that exist already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from gt_autoparallel import (
    Judge,
    JudgedStep,
    PlacementPlan,
    SharedPlan,
    UnrunnablePlanError,
    write_plan,
)
from gt_passes.errors import GraphChunkingError
from gt_trace import flex_attention_on_cpu
from gt_trainer.dry_run.fake_step import FakeStep, meta_model, step_of_placed
from gt_trainer.dry_run.simulated_step import SimulatedStep
from gt_trainer.models.device_defaults import default_options
from gt_trainer.placement.expert_blocks import expert_blocks
from gt_trainer.placement.judged_run import judged_run
from gt_trainer.placement.memory_budget import asked_budget_bytes
from gt_trainer.placement.pipeline_judgement import PipelineJudgement
from gt_trainer.placement.place_decoder import place_by_plan
from gt_trainer.placement.plan_judge import NewJudge
from gt_trainer.trainer import GraphTrainer


def config_for_judging(config: GraphTrainer.Config) -> GraphTrainer.Config:
    """Return the run whose simulated step decides between plans.

    A placement does not depend on what runs on the captured step afterwards. Therefore plans are
    compared by the native recipe with the defaults of the device. Of the options under
    ``--compile`` only those stay that shape the captured step itself. So both backends of planned
    steps, and an eager run, get one placement.

    Args:
        config: of the run, with a solver and without a pipeline. Not changed.
    """
    options = config.compile
    judged = replace(
        default_options(None),
        autoparallel=options.autoparallel,
        autoparallel_solver=options.autoparallel_solver,
        accumulation=options.accumulation,
        ep_overlap=options.ep_overlap,
        capture_layers=options.capture_layers,
        verify_passes=options.verify_passes,
    )
    if options.accumulation != "every_microbatch":  # CUDA graphs record no such step
        judged = replace(judged, cuda_graphs=False)
    parallelism = replace(config.parallelism, fsdp_reshard_after_forward="default")
    return replace(config, compile=judged, parallelism=parallelism)


def step_judge(
    config: GraphTrainer.Config, simulate: Callable[[FakeStep], SimulatedStep]
) -> NewJudge | None:
    """Make the judges of a run's plans; None if it plans nothing.

    Args:
        config: from ``config_for_judging``; its step is one graph.
        simulate: captures a step and prices it.
    """
    if not config.compile.autoparallel:
        return None

    def new_judge(parallel_dims: ParallelDims, mesh: DeviceMesh) -> Judge:
        def judge(plan: PlacementPlan) -> JudgedStep:
            built = meta_model(config, parallel_dims.world_size, parallel_dims=parallel_dims)
            interface = plan.graph.interface
            assert interface is not None, "the plan's model was captured in this process"
            place_by_plan(
                built.model,
                mesh,
                expert_blocks(built.model),
                SharedPlan(plan=plan, interface=interface),
            )
            try:
                with flex_attention_on_cpu():
                    return judged_step(simulate(step_of_placed(config, built.model, built)))
            except GraphChunkingError as error:
                raise UnrunnablePlanError(why_no_chunks(error)) from error

        return judge

    return new_judge


def why_no_chunks(error: GraphChunkingError) -> str:
    """Why a plan's step cannot be made, in one line."""
    chunks = "the chunks of --compile.ep_overlap.enabled"
    return f"its step cannot run in {chunks}: {'; '.join(error.shown_problems)}"


def judged_step(found: SimulatedStep) -> JudgedStep:
    """Return the numbers of a simulated step by which plans are chosen."""
    return JudgedStep(step_us=found.step_us, peak_bytes=found.peak_bytes, fits=found.fits)


def judged_pipeline(
    config: GraphTrainer.Config,
    world_size: int,
    *,
    planned: SimulatedStep | GraphChunkingError,
    by_hand: SimulatedStep | None = None,
) -> PipelineJudgement:
    """Compare the steps of a pipeline, and the memory that they take with the given budget.

    Args:
        config: of the planned one.
        world_size: ranks of the whole job.
        planned: its step; or why the plan's stages cannot run in chunks, which leaves ``by_hand``.
        by_hand: the step of the same run without a solver; None if there is no planned one.
    """
    return PipelineJudgement(
        planned=None if isinstance(planned, GraphChunkingError) else judged_step(planned),
        by_hand=None if by_hand is None else judged_step(by_hand),
        no_step_because=why_no_chunks(planned) if isinstance(planned, GraphChunkingError) else "",
        budget_bytes=asked_budget_bytes(config.compile.autoparallel_solver),
        made_for=judged_run(config, world_size),
    )


def keeping_the_best(new_judge: NewJudge | None, path: Path) -> NewJudge | None:
    """Judges like those of ``new_judge``, whose best plan until now is always in a file.

    So a search that is ended has found something. The first plan is there before it is simulated,
    until it is known that no step can be made of it.

    Args:
        new_judge: None if there is nothing to judge.
        path: of the file.
    """
    if new_judge is None:
        return None

    def new_keeping_judge(parallel_dims: ParallelDims, mesh: DeviceMesh) -> Judge:
        judge = new_judge(parallel_dims, mesh)
        best: JudgedStep | None = None

        def keeping_judge(plan: PlacementPlan) -> JudgedStep:
            nonlocal best
            if best is None:
                write_plan(plan, path)
            try:
                step = judge(plan)
            except UnrunnablePlanError:
                if best is None:
                    path.unlink()
                raise
            if best is None or step.is_better_than(best):
                best = step
                write_plan(plan, path)
                logger.info(f"Placement: the best plan yet takes {step.step_us / 1e3:,.1f} ms")
            return step

        return keeping_judge

    return new_keeping_judge
