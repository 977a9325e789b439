"""Is a pipeline whose stages a solver placed faster than the same one by hand? Before it trains.

Stages have no rivals in the planner: what an expert does to a pipeline need not be a plan at all
(token exchanges of one chunk beside another's experts are none). So the whole pipeline by hand is
simulated beside the planned one, and is taken where it is faster.
"""

from __future__ import annotations

from torchtitan.tools.logging import logger

from gt_autoparallel import JudgedStep
from gt_passes.errors import GraphChunkingError
from gt_passes.simulation import Hardware
from gt_trainer.dry_run.pipeline_dry_run import pipeline_dry_run
from gt_trainer.dry_run.simulated_pipeline import SimulatedPipeline
from gt_trainer.dry_run.step_judge import why_no_chunks
from gt_trainer.placement.judged_run import judged_run
from gt_trainer.placement.memory_budget import asked_budget_bytes
from gt_trainer.placement.pipeline_judgement import PipelineJudgement
from gt_trainer.quantization.quantized_model import with_quantized_model
from gt_trainer.trainer import GraphTrainer


def judged_pipeline(
    config: GraphTrainer.Config,
    world_size: int,
    *,
    planned: SimulatedPipeline,
    by_hand: SimulatedPipeline,
) -> PipelineJudgement:
    """Hold the steps of both against each other, and against the budget that was asked for.

    Args:
        config: of the planned one.
        world_size: ranks of the whole job.
        planned: its step.
        by_hand: the step of the same run without a solver.
    """
    return PipelineJudgement(
        planned=_step(planned),
        by_hand=_step(by_hand),
        budget_bytes=asked_budget_bytes(config.compile.autoparallel_solver),
        made_for=judged_run(config, world_size),
    )


def judged_without_a_step(
    config: GraphTrainer.Config, world_size: int, error: GraphChunkingError
) -> PipelineJudgement:
    """The judgement where a plan's stages cannot run in chunks: nothing is left but by hand.

    Args:
        config: of the planned pipeline.
        world_size: ranks of the whole job.
        error: of its capture.
    """
    return PipelineJudgement(
        planned=None,
        by_hand=None,
        no_step_because=why_no_chunks(error),
        budget_bytes=asked_budget_bytes(config.compile.autoparallel_solver),
        made_for=judged_run(config, world_size),
    )


def judge_before_training(
    config: GraphTrainer.Config,
    by_hand: GraphTrainer.Config,
    world_size: int,
    *,
    hardware: Hardware | None = None,
) -> PipelineJudgement:
    """Plan a pipeline, and simulate its step beside the one by hand, if the plan has one.

    For a process that has no process group yet. The plans are written to the dump folder, and how
    stages were balanced is logged.

    Args:
        config: as for ``pipeline_dry_run``, with a solver. Not changed.
        by_hand: the same run without one, as ``settled_by_hand`` gives it. Not changed.
        world_size: as for ``pipeline_dry_run``.
        hardware: the machine to plan for and to simulate; H100 SXM by default.

    Raises:
        Exception: whatever building, placing or capturing raises, but that the plan's stages cannot
            run in chunks.
    """
    try:
        planned = pipeline_dry_run(with_quantized_model(config), world_size, hardware=hardware)
    except GraphChunkingError as error:
        return judged_without_a_step(config, world_size, error)
    expert = pipeline_dry_run(with_quantized_model(by_hand), world_size, hardware=hardware)
    if planned.balance is not None:
        for line in str(planned.balance).splitlines():
            logger.info(line)
    return judged_pipeline(config, world_size, planned=planned.simulated, by_hand=expert.simulated)


def _step(found: SimulatedPipeline) -> JudgedStep:
    return JudgedStep(step_us=found.step_us, peak_bytes=found.peak_bytes, fits=found.fits)
