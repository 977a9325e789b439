"""What a judgement of a pipeline holds for: two runs alike in it have the same simulated steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from gt_autoparallel import PlacementPrices
from gt_config import Fingerprint, refuse_stale
from gt_config.errors import StaleFingerprintError
from gt_trainer.model_identity import identity_of
from gt_trainer.placement.memory_budget import asked_budget_bytes
from gt_trainer.placement.pipeline_judgement import (
    NoJudgementError,
    PipelineJudgement,
    digest_of,
    read_judgement,
)
from gt_trainer.placement.planned_machine import planned_machine
from gt_trainer.quantization.quantized_model import with_quantized_model

_BATCH = (
    "local_batch_size",
    "global_batch_size",
    "seq_len",
    "dtype",
    "mixed_precision_param",
    "mixed_precision_reduce",
)


def judged_run(config: Any, world_size: int) -> Fingerprint:
    """The model, the mesh, the batch, the options and the machine of a pipeline.

    The memory budget is no part of it: a judgement for the step by hand is held against any.

    Args:
        config: a ``GraphTrainer.Config`` with a solver. Not changed.
        world_size: ranks of the whole job.
    """
    spec = with_quantized_model(config).model_spec
    assert spec is not None
    options = config.compile
    solver = dataclasses.replace(options.autoparallel_solver, memory_budget_gib=None)
    return Fingerprint.of(
        {
            "model": identity_of(spec).fields,
            "world_size": world_size,
            "parallelism": config.parallelism,
            "training": {name: getattr(config.training, name) for name in _BATCH},
            "compile": dataclasses.replace(options, autoparallel_solver=solver),
            "machine": PlacementPrices(planned_machine().cost_model()).digest,
        }
    )


def judgement_for(path: Path, config: Any, world_size: int) -> PipelineJudgement:
    """Read why a run is placed by hand, by the budget that it asks for now.

    Args:
        path: of a file with what ``written_judgement`` gave.
        config: a ``GraphTrainer.Config`` with a solver. Not changed.
        world_size: ranks of the whole job.

    Raises:
        NoJudgementError: as ``read_judgement``; or it is of another run, or the step by hand takes
            more than this one asks for.
        OSError: it cannot be read.
    """
    judgement = _of_this_run(path, config, world_size)
    budget = asked_budget_bytes(config.compile.autoparallel_solver)
    judgement = dataclasses.replace(judgement, budget_bytes=budget)
    if not judgement.takes_by_hand:
        raise NoJudgementError(
            f"{path} does not take the step by hand for this memory budget: {judgement}"
        )
    return judgement


def judgement_left(path: Path, plan_path: Path, config: Any, world_size: int) -> PipelineJudgement:
    """Read what a dry run left for a start: why it is placed by hand, or that its plan is taken.

    Args:
        path: of a file with what ``written_judgement`` gave.
        plan_path: of the plan that the dry run left beside it.
        config: a ``GraphTrainer.Config`` with a solver. Not changed.
        world_size: ranks of the whole job.

    Raises:
        NoJudgementError: as ``read_judgement``; or it is of another run, judges a plan that was
            found for another memory budget, or takes one that is no longer there.
        OSError: it cannot be read.
    """
    judgement = _of_this_run(path, config, world_size)
    if judgement.budget_bytes != asked_budget_bytes(config.compile.autoparallel_solver):
        raise NoJudgementError(f"{path} judges a plan that was found for another memory budget")
    if judgement.takes_by_hand:
        return judgement
    if not plan_path.is_file() or digest_of(plan_path.read_bytes()) != judgement.plan_digest:
        raise NoJudgementError(f"{path} takes a plan that is not, or no longer, {plan_path}")
    return judgement


def _of_this_run(path: Path, config: Any, world_size: int) -> PipelineJudgement:
    judgement = read_judgement(path)
    try:
        refuse_stale(stored=judgement.made_for, current=judged_run(config, world_size))
    except StaleFingerprintError as error:
        raise NoJudgementError(f"{path} is of another run; {error}") from None
    return judgement
