"""What is wrong with the pipeline options, before there is a model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import get_args

from torchtitan.config import ParallelismConfig
from torchtitan.models.common.decoder import Decoder

from gt_config import Violation
from gt_config.idle_options import idle
from gt_pipeline.errors import GtPipelineError
from gt_pipeline.schedules import Schedule, limit_deferred_weights, lower
from gt_pipeline.schedules.deferred_weights import max_deferred_weights
from gt_trainer.decoder.tied_stages import EMBEDDING, PROJECTION
from gt_trainer.parallelism_options import PipelineBalance, balance_of
from gt_trainer.pipelines.pipeline_plan import PipelinePlan, pipeline_plan
from gt_trainer.trainer import GraphTrainer

_PREFIX = "--parallelism.pipeline_parallel"


def pipeline_violations(config: GraphTrainer.Config) -> Iterator[Violation]:
    """What a pipeline of this model cannot be; nothing if there is none."""
    model = config.model_spec.model if config.model_spec is not None else None
    degree = config.parallelism.pipeline_parallel_degree
    yield from balance_violations(config.parallelism, is_placed=config.compile.autoparallel)
    if degree < 2 or not isinstance(model, Decoder.Config):
        return
    if model.enable_weight_tying:
        yield from _tied_weight_of_two_groups(config)
    of_stages = list(
        stage_violations(
            config.parallelism,
            num_layers=len(model.layers),
            local_batch_size=config.training.local_batch_size,
        )
    )
    yield from of_stages
    if of_stages or config.compile.mode == "none":
        return
    plan = pipeline_plan(
        config.parallelism,
        num_layers=len(model.layers),
        local_batch_size=config.training.local_batch_size,
    )
    limit = config.compile.pipeline_deferred_weights
    if limit is not None and limit > 0:
        yield from _deferral_violations(plan.schedule, limit)
    if config.compile.fsdp_second_group:
        yield from _idle_second_group(config, plan.schedule)


def _tied_weight_of_two_groups(config: GraphTrainer.Config) -> Iterator[Violation]:
    """Two stages update the weight, each by the options that its own name for it has."""
    patterns = [group.pattern for group in config.optimizer.param_groups]
    first_match = [
        next((pattern for pattern in patterns if re.search(pattern, name)), None)
        for name in (EMBEDDING, PROJECTION)
    ]
    if first_match[0] != first_match[1]:
        yield Violation(
            flag="--optimizer.param_groups",
            value=patterns,
            allowed=f"patterns that match {EMBEDDING} and {PROJECTION} alike: this model ties "
            "them, and each of two pipeline stages updates the weight by its own name",
            fix="let one pattern match both, or leave the pipeline out",
        )


def balance_violations(parallelism: ParallelismConfig, *, is_placed: bool) -> Iterator[Violation]:
    """What stages that are balanced by simulated time do not go with.

    Args:
        parallelism: of the run.
        is_placed: whether a solver places the model.
    """
    balance = balance_of(parallelism)
    flag, balanced = f"{_PREFIX}_balance", f"{_PREFIX}_balance {balance}"
    if balance == "layers":
        return
    if balance not in get_args(PipelineBalance):
        yield Violation(
            flag=flag,
            value=balance,
            allowed=" or ".join(map(repr, get_args(PipelineBalance))),
            fix="use one of them",
        )
        return
    if parallelism.pipeline_parallel_degree < 2:
        degree = f"{_PREFIX}_degree"
        yield idle(flag, balance, "layers", because=f"{degree} is 1", remedy=f"{degree} 2 or more")
        return
    if balance == "planned" and not is_placed:
        yield Violation(
            flag=flag,
            value=balance,
            allowed="'layers' or 'simulated' without --compile.autoparallel: no solver places "
            "modules",
            fix="use simulated, or --compile.autoparallel",
        )
    if parallelism.module_fqns_per_model_part is not None:
        yield Violation(
            flag="--parallelism.module_fqns_per_model_part",
            value=parallelism.module_fqns_per_model_part,
            allowed=f"None with {balanced}, which finds what is on each stage",
            fix="leave out one of the two",
        )
    for end, what in (
        ("first", "what stands before the first layer"),
        ("last", "what stands after the last layer"),
    ):
        name = f"pipeline_parallel_{end}_stage_less_layers"
        default = next(each.default for each in fields(parallelism) if each.name == name)
        value = getattr(parallelism, name)
        if value != default:
            yield Violation(
                flag=f"--parallelism.{name}",
                value=value,
                allowed=f"its default {default} with {balanced}, which prices {what}",
                fix="leave out one of the two",
            )


def _idle_second_group(config: GraphTrainer.Config, schedule: Schedule) -> Iterator[Violation]:
    """A group of their own helps reductions past what their rank begins after them."""
    exchanges = config.parallelism.expert_parallel_degree > 1
    for actions in lower(schedule, unshards=True, reduces=True).actions:
        kinds = [action.kind for action in actions]
        behind = actions[kinds.index("REDUCE_GRAD") :]
        if any(each.kind == "UNSHARD" or (exchanges and each.compute_parts) for each in behind):
            return
    what = "gathers parameters" + (" or exchanges tokens" if exchanges else "")
    yield Violation(
        flag="--compile.fsdp_second_group",
        value=True,
        allowed=f"False with the schedule {schedule.name}: no rank {what} after it has "
        "begun to reduce gradients, so that nothing would run beside that",
        fix="leave the flag out, or give each rank more than 3 stages "
        "(--parallelism.pipeline_parallel_layers_per_stage), of which not all are gathered at once",
    )


def stage_violations(
    parallelism: ParallelismConfig, *, num_layers: int, local_batch_size: int
) -> Iterator[Violation]:
    """What is wrong with microbatches, schedule and stages; the degree is 2 or more."""
    size = parallelism.pipeline_parallel_microbatch_size
    if size < 1 or local_batch_size % size:
        divisors = [each for each in range(1, local_batch_size + 1) if local_batch_size % each == 0]
        yield Violation(
            flag=f"{_PREFIX}_microbatch_size",
            value=size,
            allowed=f"a divisor of --training.local_batch_size {local_batch_size}",
            fix=f"use one of {', '.join(map(str, divisors))}",
        )
        return
    try:
        plan = pipeline_plan(parallelism, num_layers=num_layers, local_batch_size=local_batch_size)
    except FileNotFoundError:
        yield Violation(
            flag=f"{_PREFIX}_schedule_csv",
            value=parallelism.pipeline_parallel_schedule_csv,
            allowed="a file that exists",
            fix="give the path of a schedule, or leave the flag out",
        )
        return
    except GtPipelineError as error:
        yield Violation(
            flag=f"{_PREFIX}_schedule",
            value=parallelism.pipeline_parallel_schedule,
            allowed="a schedule that fits degree, layers and microbatches",
            fix=str(error),
        )
        return
    yield from _misfits(parallelism, plan, local_batch_size // size)


def _deferral_violations(schedule: Schedule, limit: int) -> Iterator[Violation]:
    """Limits that change nothing, or what they may not."""
    flag = "--compile.pipeline_deferred_weights"
    most = max_deferred_weights(schedule)
    if limit >= most:
        puts_off = f"puts off {most} at most" if most else "puts off none"
        yield Violation(
            flag=flag,
            value=limit,
            allowed=f"less than the schedule puts off: {schedule.name} {puts_off}",
            fix="set it to None",
        )
        return
    try:
        limit_deferred_weights(schedule, limit)
    except GtPipelineError as error:
        yield Violation(
            flag=flag,
            value=limit,
            allowed="a limit that leaves the order in which a stage's gradients are added",
            fix=str(error),
        )


def _misfits(
    parallelism: ParallelismConfig, plan: PipelinePlan, num_microbatches: int
) -> Iterator[Violation]:
    """What a schedule from a file, or stages by name, may contradict."""
    for name, has, wants in (
        ("ranks", plan.schedule.num_ranks, parallelism.pipeline_parallel_degree),
        ("microbatches", plan.schedule.num_microbatches, num_microbatches),
        ("stages", plan.schedule.num_stages, len(plan.names_per_stage)),
    ):
        if has != wants:
            yield Violation(
                flag=f"{_PREFIX}_schedule_csv",
                value=parallelism.pipeline_parallel_schedule_csv,
                allowed=f"a schedule for {wants} {name}; it has {has}",
                fix="write the schedule for these sizes, or change them",
            )
