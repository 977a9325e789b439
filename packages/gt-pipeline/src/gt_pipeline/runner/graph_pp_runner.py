"""`GraphPPRunner`: one rank's part in training and evaluation steps of a pipeline.

Its parts, each in a file of its own: inputs are split (`microbatches`), a schedule's actions were
bound once to callables (`step_program`) that move tensors (`transfers`), gradients of shared
parameters are summed (`shared_parameters`), the ranks agree that the step succeeded (`failure`),
and only then gradients reach the parameters.

Public peers: torch.distributed.pipelining's schedules and torchtitan's graph trainer. There, the
runtime of a schedule is another for one stage per rank than for several, evaluation before the
first training step fails for V schedules, and gradients are written while the step may still fail.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from gt_pipeline.errors import (
    MicrobatchError,
    RunnerClosedError,
    RunnerSetupError,
    StageOutputError,
)
from gt_pipeline.runner.connections import Connections
from gt_pipeline.runner.failure import FailureReport
from gt_pipeline.runner.microbatches import MicrobatchDims, split_microbatches
from gt_pipeline.runner.posted_order import circles
from gt_pipeline.runner.setup_checks import (
    agree_on_setup,
    facts_of_rank,
    kwargs_of_stages,
    names_of_stages,
    ranks_of_stages,
)
from gt_pipeline.runner.shared_parameters import find_members, shared_parameters
from gt_pipeline.runner.stage_collectives import compare_evaluations, prepare_pairs
from gt_pipeline.runner.stage_protocol import (
    ComputedStep,
    KnowsUnshardedBytes,
    MicrobatchInputs,
    PipelineStageGraphs,
    RecordsActions,
    ReplaysSteps,
    StepReplayer,
    Tensors,
)
from gt_pipeline.runner.step_program import StepProgram, bind_program
from gt_pipeline.runner.step_record import StepRecord, record_actions
from gt_pipeline.runner.transfers import make_transfers
from gt_pipeline.schedules import Action, Schedule, lower
from gt_pipeline.schedules.lowering import excess_of_bytes
from gt_pipeline.schedules.schedule import forward_only
from gt_pipeline.split import SharedGroup

LossReduction: TypeAlias = Literal["sum", "mean"]
_StepKind: TypeAlias = Literal["train", "eval"]

_BEFORE_ACTIONS = -1
_BEFORE_INPUTS = -2
_REPLAYING = -3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step computed, apart from gradients. Empty on ranks without the last stage."""

    losses: Tensors = ()
    """The loss of each microbatch, in their order, as the last stage returned it."""

    outputs: tuple[Tensors, ...] = ()
    """What the last stage returned beside the loss, by microbatch."""

    record: StepRecord | None = None
    """What this rank did and when, if the step was asked to record it."""


class GraphPPRunner:
    """Runs a schedule over the stages of this rank. Making one is collective over the world.

    Every rank of the world makes a runner, and they step together: where gradients are reduced,
    pipelines wait for each other.

    A step that fails on one rank ends on all of them with the same `PipelineStepError`, and no
    parameter's ``grad`` has changed on any. The runner is closed then: transfers of the failed step
    may still be on their way, so it refuses another. The stages are as before the step, and another
    runner over them starts clean.

    Args:
        stages: of this rank, in any order.
        schedule: with this rank's stages at this rank's place in ``group``.
        group: ranks of the pipeline, in the schedule's order. Not given: the whole world, or this
            rank alone if the schedule is for one.
        loss_reduction: what gradients are of: the sum of the microbatches' losses, or their mean.
            It scales the gradient that each microbatch's backward starts with; losses are
            returned as they are.
        dims: along which dimensions inputs are split; not given: every tensor along its first.
        shared_groups: parameters that are one across stages. Their gradients are summed, in the
            order in which a group lists their names. Their values are made equal by
            `synchronize_shared_parameters`.
        collective_groups: groups over which the stages' own graphs communicate. When a step fails
            they are closed, so that ranks that wait in them end at once and not by a timeout;
            stages that need them can run no more then.
        max_unsharded_stages: stages whose parameters are gathered at any time; see `lower`.
        max_unsharded_bytes: of these parameters; None: no limit. Stages that cannot say how many
            they have count nothing. Refused where actions are recorded one by one.
        timeout: after which a transfer or an agreement fails; None: as for other groups.

    Raises:
        RunnerSetupError: on every rank, with what any of them found wrong: arguments, stages that
            do not fit, or ranks that hold the same stage and would run other collectives for it.
        ScheduleError: the schedule cannot run.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStageGraphs],
        schedule: Schedule,
        *,
        group: dist.ProcessGroup | None = None,
        loss_reduction: LossReduction = "mean",
        dims: MicrobatchDims | None = None,
        shared_groups: Sequence[SharedGroup] = (),
        collective_groups: Sequence[dist.ProcessGroup] = (),
        max_unsharded_stages: int = 3,
        max_unsharded_bytes: int | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        planned: dict[_StepKind, Schedule] = {"train": schedule, "eval": forward_only(schedule)}
        # Of this rank's stages: what others gather changes nothing in its list.
        unsharded_bytes = {
            stage.stage_index: stage.unsharded_bytes
            for stage in stages
            if isinstance(stage, KnowsUnshardedBytes)
        }
        too_large = excess_of_bytes(
            schedule, max_unsharded_bytes=max_unsharded_bytes, unsharded_bytes=unsharded_bytes
        )
        lowered = {
            mode: lower(
                each,
                unshards=True,
                reduces=mode == "train",
                max_unsharded_stages=max_unsharded_stages,
                max_unsharded_bytes=None if too_large else max_unsharded_bytes,
                unsharded_bytes=unsharded_bytes,
            )
            for mode, each in planned.items()
        }
        self._schedule = schedule
        self._dims = MicrobatchDims() if dims is None else dims
        self._stages = {
            stage.stage_index: stage for stage in sorted(stages, key=lambda each: each.stage_index)
        }
        self._global_rank, pipeline = _ranks(schedule, group)
        self._connections = Connections(collective_groups)
        # Until `close`, or until nobody holds the runner any more.
        self._release = weakref.finalize(self, self._connections.release)
        if _world_size() > 1:
            self._connections.agree(timeout)
        pair_problems = prepare_pairs(lowered["train"], self._stages)
        self._replayer = _step_replayer(self._stages)  # which reads the graphs of pairs, too
        if max_unsharded_bytes is not None:
            too_large += _gathered_for_good(self._stages, unsharded_bytes)
        facts = agree_on_setup(
            facts_of_rank(
                stages,
                schedule,
                rank=self._global_rank,
                pipeline=pipeline,
                options={"loss_reduction": loss_reduction, "shared_groups": list(shared_groups)},
                problems=[
                    *_reduction_problems(loss_reduction),
                    *(
                        f"max_unsharded_bytes is {max_unsharded_bytes}: {each}"
                        for each in too_large
                    ),
                    *pair_problems,
                    *(
                        f"{mode} steps would deadlock: {each}"
                        for mode, lists in lowered.items()
                        for each in circles(lists)
                    ),
                ],
            ),
            self._connections.agreement_group,
            stages,
        )
        self._rank = pipeline.index(self._global_rank)
        self._known_kwargs = kwargs_of_stages(facts[tuple(pipeline)])
        self._connections.device = next(iter(self._stages.values())).device
        self._connections.transfers = make_transfers(facts, timeout=timeout)
        self._connections.shared = shared_parameters(
            [
                members
                for each in facts.values()
                for members in find_members(
                    shared_groups, names_of_stages(each), ranks_of_stages(each)
                )
            ],
            self._stages,
            rank=self._global_rank,
            timeout=timeout,
        )
        self._inputs: list[MicrobatchInputs] = []
        self._programs = {
            mode: bind_program(
                each,
                rank=self._rank,
                stages=self._stages,
                inputs=self._inputs,
                transfers=self._connections.transfers,
                loss_gradient=1.0 / schedule.num_microbatches if loss_reduction == "mean" else 1.0,
                evaluates=mode == "eval",
            )
            for mode, each in lowered.items()
        }
        self._connections.release_recordings += [
            stage.release_recordings
            for stage in self._stages.values()
            if isinstance(stage, RecordsActions)
        ]
        if self._replayer is not None:
            self._connections.release_recordings.append(self._replayer.release)
        self.record_steps = False
        """Whether results have a `StepRecord`; measuring costs time on every action."""
        self._has_evaluated = False
        self._step = 0
        self._position = 0
        self._failure = ""
        """What ended the runner, as text: an error's traceback holds what was computed last."""

    @property
    def replays_steps(self) -> bool:
        """Whether this rank's steps are recorded as a whole, after the first ones."""
        return self._replayer is not None

    @property
    def schedule(self) -> Schedule:
        """What it runs."""
        return self._schedule

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """Train on one batch: add its gradients to the ``grad`` of every parameter.

        Args:
            args: of the model; used by the first stage's rank, and may be left out on others.
            target: what the loss is computed from; used by the last stage's rank.
            kwargs: of the model; used by every stage that takes them, so given on every rank.

        Raises:
            PipelineStepError: on every rank, if the step failed on any. Its cause is what this rank
                raised: a `MicrobatchError` if inputs here cannot be split evenly, or no stage takes
                them.
            RunnerClosedError: the runner was closed, or a step of it failed.
        """
        return self._run("train", self._splitting(args, kwargs, target))

    def eval(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """Compute the losses of one batch; gradients and what training saved stay as they are.

        Arguments and errors are those of `step`. It needs no training step before.
        """
        return self._run("eval", self._splitting(args, kwargs, target))

    def step_microbatches(self, microbatches: Sequence[MicrobatchInputs]) -> StepResult:
        """As `step`, of inputs that are split already, one for each microbatch."""
        return self._run("train", lambda: microbatches)

    def eval_microbatches(self, microbatches: Sequence[MicrobatchInputs]) -> StepResult:
        """As `eval`, of inputs that are split already, one for each microbatch."""
        return self._run("eval", lambda: microbatches)

    def synchronize_shared_parameters(self) -> None:
        """Copy the values of each shared group's first parameter to its others.

        After values were set, by initialization or from a checkpoint that has them apart. Steps
        keep them equal, as their gradients are. Collective over the pipeline.
        """
        for shared in self._connections.shared:
            shared.synchronize()

    def close(self) -> None:
        """Give back process groups and threads. Harmless when called twice."""
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _splitting(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any
    ) -> Callable[[], Sequence[MicrobatchInputs]]:
        count = self._schedule.num_microbatches
        return lambda: split_microbatches(
            args, kwargs, target, num_microbatches=count, dims=self._dims
        )

    def _run(self, mode: _StepKind, inputs: Callable[[], Sequence[MicrobatchInputs]]) -> StepResult:
        self._check_open()
        program = self._programs[mode]
        self._step += 1
        self._position = _BEFORE_INPUTS
        try:
            self._connections.watch(self._step)
            if mode == "eval" and not self._has_evaluated:
                self._prepare_evaluation()
            self._position = _BEFORE_ACTIONS
            with torch.no_grad():
                self._fill_inputs(inputs())
                record, gradients = None, []
                computed = self._replay(program) if mode == "train" else None
                if computed is None:
                    record = self._run_actions(program)
                    self._position = len(program.actions)
                    gradients = self._gradients() if mode == "train" else []
        except BaseException as error:  # noqa: BLE001  # other ranks must hear of whatever it is
            self._fail(program, error)
        if not self._connections.vote():
            self._fail(program, None)
        # Every rank has used what was sent to it. Waiting for sends before would not be safe: one
        # that was forgotten when another rank closed its transfers never ends.
        program.let_go()
        for parameter, gradient in gradients if computed is None else computed.gradients:
            _add_gradient(parameter, gradient)
        for stage in self._stages.values():
            stage.discard()
        self._inputs.clear()
        results = program.take_results() if computed is None else computed.results
        return StepResult(
            losses=tuple(each[0] for each in results),
            outputs=tuple(each[1:] for each in results),
            record=record,
        )

    def _prepare_evaluation(self) -> None:
        # Before anything of the step that can fail on one rank alone: all take part.
        group = self._connections.agreement_group
        compare_evaluations(list(self._stages.values()), self._global_rank, group)
        self._has_evaluated = True

    def _fill_inputs(self, microbatches: Sequence[MicrobatchInputs]) -> None:
        if len(microbatches) != self._schedule.num_microbatches:
            raise MicrobatchError(
                what=f"{len(microbatches)} microbatches were given",
                problems=[f"the schedule is for {self._schedule.num_microbatches}"],
            )
        if self._known_kwargs is not None:
            given = {name for each in microbatches for name in each.kwargs}
            if unknown := sorted(given - self._known_kwargs):
                raise MicrobatchError(
                    what="no stage takes what was given",
                    problems=[
                        f"kwargs[{name!r}] is not among those that stages take: "
                        f"{', '.join(sorted(self._known_kwargs)) or 'there are none'}"
                        for name in unknown
                    ],
                )
        self._inputs[:] = microbatches

    def _run_actions(self, program: StepProgram) -> StepRecord | None:
        if self.record_steps:
            return record_actions(
                program.actions,
                program.runs,
                rank=self._rank,
                stages=self._stages,
                at=functools.partial(setattr, self, "_position"),
            )
        for self._position, run in enumerate(program.runs):
            run()
        return None

    def _replay(self, program: StepProgram) -> ComputedStep | None:
        if self._replayer is None or self.record_steps:
            return None
        self._position = _REPLAYING
        return self._replayer.run(self._inputs, lambda: self._computed(program))

    def _computed(self, program: StepProgram) -> ComputedStep:
        """Run all actions, and wait for all that they have launched."""
        self._run_actions(program)
        gradients = self._gradients()
        program.finish_sends()
        self._position = _REPLAYING
        return ComputedStep(gradients=gradients, results=program.take_results())

    def _gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Every parameter that has a gradient, with it."""
        by_stage = {index: dict(stage.gradients()) for index, stage in self._stages.items()}
        for shared in self._connections.shared:
            shared.sum_gradients(by_stage)
        pairs = []
        problems = []
        for index, gradients in by_stage.items():
            parameters = self._stages[index].parameters()
            for name, gradient in gradients.items():
                parameter = parameters[name]
                pairs.append((parameter, gradient))
                if (
                    gradient.shape != parameter.shape
                    or gradient.dtype != parameter.dtype
                    or gradient.device != parameter.device
                ):
                    form, found = _form(parameter), _form(gradient)
                    problems.append(f"stage {index}: of {name}, {form}, is {found}")
        if problems:
            # Now, since after the vote it would be too late: others would have added theirs.
            raise StageOutputError(what="gradients do not fit parameters", problems=problems)
        return pairs

    def _fail(self, program: StepProgram, error: BaseException | None) -> NoReturn:
        """End the step on all ranks; ``error`` is None where this one had nothing against it."""
        action, stage = _place(program.actions, self._position)
        reason = "a rank did not confirm it" if error is None else _describe(error)
        mine = FailureReport(rank=self._global_rank, stage=stage, action=action, reason=reason)
        failure = self._connections.fail(self._step, mine, votes=error is not None).error()
        self._failure = str(failure)
        program.let_go()
        program.take_results()
        self._inputs.clear()
        for each in self._stages.values():
            each.discard()
        if error is not None and not isinstance(error, Exception):
            raise error  # KeyboardInterrupt and the like: this process is told to end
        raise failure from error

    def _check_open(self) -> None:
        if self._failure:
            raise RunnerClosedError(f"an earlier step of this runner failed: {self._failure}")
        if not self._release.alive:
            raise RunnerClosedError("this runner was closed; build another over the same stages")


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _step_replayer(stages: Mapping[int, PipelineStageGraphs]) -> StepReplayer | None:
    first = next(iter(stages.values()), None)  # none is found wrong later, on all ranks
    return first.step_replayer(stages) if isinstance(first, ReplaysSteps) else None


def _gathered_for_good(
    stages: Mapping[int, PipelineStageGraphs], unsharded_bytes: Mapping[int, int]
) -> list[str]:
    """A sentence for each stage that never frees its gathered parameters."""
    return [
        f"actions of stage {index} are recorded one by one, and such recordings read gathered "
        "parameters at addresses that stay, so that nothing frees them"
        for index, stage in stages.items()
        if isinstance(stage, RecordsActions)
        and stage.records_actions
        and unsharded_bytes.get(index, 0) > 0
    ]


def _ranks(schedule: Schedule, group: dist.ProcessGroup | None) -> tuple[int, list[int]]:
    """This process's global rank, and those of its pipeline."""
    if not (dist.is_available() and dist.is_initialized()):
        if schedule.num_ranks > 1:
            raise RunnerSetupError(
                what="this pipeline cannot run",
                problems=[
                    f"the schedule is for {schedule.num_ranks} ranks, and there is no process group"
                ],
            )
        return 0, [0]
    rank = dist.get_rank()
    if group is not None:
        return rank, dist.get_process_group_ranks(group)
    return rank, [rank] if schedule.num_ranks == 1 else list(range(dist.get_world_size()))


def _place(actions: Sequence[Action], position: int) -> tuple[str, int | None]:
    """What runs at a position, and of which stage."""
    if position == _BEFORE_INPUTS:
        return "preparing the step", None
    if position == _BEFORE_ACTIONS:
        return "splitting inputs into microbatches", None
    if position == _REPLAYING:
        return "replaying the step", None
    if position == len(actions):
        return "collecting gradients after all actions", None
    return str(actions[position]), actions[position].stage


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _reduction_problems(loss_reduction: str) -> list[str]:
    """On every rank, so that none waits for one that refused alone."""
    allowed = get_args(LossReduction)
    if loss_reduction in allowed:
        return []
    return [f"loss_reduction is {loss_reduction!r}; allowed: {' or '.join(map(repr, allowed))}"]


def _form(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} on {tensor.device}"


def _add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
        return
    with torch.no_grad():
        parameter.grad += gradient
