"""PyTorch's schedule object over stages, by name or from a CSV file.

What ``torch.distributed.pipelining`` offers, with two differences: bad sizes are refused with every
reason at once, and stages that run explicit backward graphs are served too. PyTorch runs backward
actions if, and only if, a schedule holds a loss function, because eager backwards start from the
loss. Graph stages have the loss inside the last stage's forward graph and hold no such function.

Seed: "Refactor pipeline parallel helpers for graph PP reuse" (pytorch/torchtitan#2724).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from gt_pipeline._torch_internals import (
    PipelineContext,
    PipelineStageBase,
    TorchSchedule,
    force_backward,
    prepare_runtime,
    register_function,
    runs_actions,
    runs_backward,
    torch_schedule,
)
from gt_pipeline.errors import ScheduleError
from gt_pipeline.schedules.actions import (
    TEXT_OF_KIND,
    Action,
    ActionKind,
    PointToPoint,
    parse_action,
)
from gt_pipeline.schedules.named_schedules import schedule_of
from gt_pipeline.schedules.schedule import Schedule
from gt_pipeline.schedules.schedule_csv import schedule_from_csv
from gt_pipeline.schedules.schedule_rules import find_schedule_rules

_ONLY_IN_TRAINING = ("FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "REDUCE_GRAD")


def build_pipeline_schedule(
    stages: Sequence[PipelineStageBase],
    *,
    num_microbatches: int,
    name: str | None = None,
    csv_path: Path | str | None = None,
    loss_fn: Callable[..., Any] | None = None,
    backward_requires_autograd: bool = True,
) -> TorchSchedule:
    """Return PyTorch's schedule object over this rank's stages.

    Gradients are the sum over the microbatches. If the loss is a mean over its microbatch, divide
    the loss, or the gradients after the step, by the number of microbatches.

    Args:
        stages: of this rank, ascending by index.
        num_microbatches: that one step runs.
        name: of the schedule, one of ``SCHEDULE_NAMES`` in any case; or else
        csv_path: of a file as ``schedule_from_csv`` reads it.
        loss_fn: from the last stage's output and a target to a scalar. Without one, an autograd
            schedule runs forward only.
        backward_requires_autograd: True for eager stages. False for stages that run explicit
            backward graphs: backward actions then run although there is no ``loss_fn``, gradients
            need not be enabled around ``step``, and the schedule is always PyTorch's runtime over
            actions, so that ``register_action_functions`` can say what runs them.

    Raises:
        FileNotFoundError: no such CSV file.
        ScheduleError: unknown name, sizes that the schedule cannot have, a CSV file whose schedule
            cannot run or is for other stages, or arguments that contradict each other; lists every
            violation.
    """
    _check_arguments(
        stages,
        name=name,
        csv_path=csv_path,
        loss_fn=loss_fn,
        backward_requires_autograd=backward_requires_autograd,
    )
    num_ranks, num_stages = stages[0].group_size, stages[0].num_stages
    if csv_path is not None:
        schedule = schedule_from_csv(csv_path)
    else:
        assert name is not None
        schedule = schedule_of(
            name, num_ranks=num_ranks, num_stages=num_stages, num_microbatches=num_microbatches
        )
    _check_stages(schedule, stages, num_microbatches)
    options: dict[str, Any] = {
        "n_microbatches": num_microbatches,
        "loss_fn": loss_fn,
        # PyTorch would divide gradients of eager stages, and knows none of graph stages.
        "scale_grads": False,
    }
    if backward_requires_autograd and csv_path is None:
        return torch_schedule(schedule.name, stages, **options)
    runtime = prepare_runtime(
        stages,
        [[str(action) for action in row] for row in schedule.compute],
        backward_requires_autograd=backward_requires_autograd,
        **options,
    )
    if not backward_requires_autograd:
        force_backward(runtime)
    return runtime


def register_action_functions(
    schedule: TorchSchedule,
    functions: Mapping[ActionKind, Callable[[Action, PipelineContext], None]],
) -> None:
    """Have functions run all actions of the given kinds, in place of PyTorch's runtime.

    Transfers stay with PyTorch: a function for FORWARD, FULL_BACKWARD or BACKWARD_INPUT waits for
    what it takes and hands on what it makes itself, as PyTorch's runtime does for its own. In
    ``eval`` no function is called for a backward or a REDUCE_GRAD, and of an OVERLAP_F_B the
    forward goes to FORWARD's function; PyTorch itself would call them all the same.

    Args:
        schedule: of ``build_pipeline_schedule``; not GPipe or 1F1B for autograd, which PyTorch runs
            by code and not by actions.
        functions: by kind, from an action and PyTorch's context of the step (which holds the
            microbatches of its arguments and targets).

    Raises:
        ScheduleError: the schedule runs no actions, a kind is a send or a receive, or there is a
            function for OVERLAP_F_B and none for FORWARD; lists every violation.
    """
    problems = [
        f"{kind} is PyTorch's to run" for kind in functions if kind in get_args(PointToPoint)
    ]
    if not runs_actions(schedule):
        problems.append(
            f"{type(schedule).__name__} runs no actions: build it with "
            "backward_requires_autograd=False"
        )
    if "OVERLAP_F_B" in functions and "FORWARD" not in functions:
        problems.append("OVERLAP_F_B needs FORWARD too: evaluation runs its forward alone")
    if problems:
        raise ScheduleError(what="functions cannot run these actions", problems=problems)
    for kind in functions:
        register_function(schedule, TEXT_OF_KIND[kind], _dispatch(schedule, functions))


def _dispatch(
    schedule: TorchSchedule,
    functions: Mapping[ActionKind, Callable[[Action, PipelineContext], None]],
) -> Callable[[str, PipelineContext], None]:
    def run(text: str, context: PipelineContext) -> None:
        action = parse_action(text)
        if not runs_backward(schedule):
            if action.parts is not None:
                action = action.parts[0]
            if action.kind in _ONLY_IN_TRAINING:
                return
        functions[action.kind](action, context)

    return run


def _check_arguments(
    stages: Sequence[PipelineStageBase],
    *,
    name: str | None,
    csv_path: Path | str | None,
    loss_fn: Callable[..., Any] | None,
    backward_requires_autograd: bool,
) -> None:
    problems: list[str] = []
    if not stages:
        problems.append("stages is empty: give this rank's stages")
    if (name is None) == (csv_path is None):
        problems.append(f"give a name or a csv_path, not {'both' if name else 'neither'}")
    if name is not None:
        find_schedule_rules(name)
    if not backward_requires_autograd and loss_fn is not None:
        problems.append(
            "loss_fn is for autograd: explicit backward graphs have the loss in the last stage's "
            "forward graph"
        )
    if problems:
        raise ScheduleError(what="no pipeline schedule can be built from this", problems=problems)


def _check_stages(
    schedule: Schedule, stages: Sequence[PipelineStageBase], num_microbatches: int
) -> None:
    problems: list[str] = []
    if schedule.num_microbatches != num_microbatches:
        problems.append(f"it is for {schedule.num_microbatches} microbatches")
    if schedule.num_stages != stages[0].num_stages:
        problems.append(f"it is for {schedule.num_stages} stages, not {stages[0].num_stages}")
    if schedule.num_ranks != stages[0].group_size:
        problems.append(f"it is for {schedule.num_ranks} ranks, not {stages[0].group_size}")
    indices = tuple(stage.stage_index for stage in stages)
    if not problems and indices != schedule.stages_of_rank(stages[0].group_rank):
        problems.append(
            f"rank {stages[0].group_rank} holds stages {indices}, not "
            f"{schedule.stages_of_rank(stages[0].group_rank)}"
        )
    if problems:
        raise ScheduleError(
            what=f"the schedule {schedule.name} does not fit these stages", problems=problems
        )
