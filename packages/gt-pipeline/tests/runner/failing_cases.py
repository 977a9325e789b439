"""What each rank does in the tests of failures; workers import it by name."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from eager_stage import EagerStage
from runner_cases import schedule
from toy_pipeline import NUM_MICROBATCHES, batch, eager_stages, gradients_of

from gt_pipeline.errors import PipelineStepError, RunnerClosedError
from gt_pipeline.runner import GraphPPRunner
from gt_pipeline.runner.failure import FailureReport, FailureWatch, StepAgreement
from gt_pipeline.runner.stage_protocol import Tensors
from gt_pipeline.runner.transfers import TransferChannel


class BrokenStageError(Exception):
    """What a stage of these tests raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one rank saw of a step that failed."""

    error: PipelineStepError
    seconds: float
    gradients: int
    """Parameters whose ``grad`` is set."""

    discarded: bool
    """Whether the last call of every stage was `discard`, and nothing is saved."""

    refusal: str
    """What the runner says when it is asked for another step."""

    losses_of_next_runner: list[float]


def fail_in(stage: EagerStage, method: str, microbatch: int, fail: Callable[[], None]) -> None:
    """Let a stage fail in one call of a method."""
    original = getattr(stage, method)

    def failing(number: int, *args: Any, **kwargs: Any) -> Any:
        if number == microbatch:
            fail()
        return original(number, *args, **kwargs)

    setattr(stage, method, failing)


def _raise() -> None:
    raise BrokenStageError("on purpose")


def fail_at(name: str, stage_index: int, method: str, microbatch: int) -> Outcome:
    """One step in which one stage raises, and what a new runner does after it."""
    planned = schedule(name)
    stages = eager_stages(planned, dist.get_rank())
    for stage in stages:
        if stage.stage_index == stage_index:
            fail_in(stage, method, microbatch, _raise)
    return _outcome(stages, name, lambda runner: runner.step(batch()[0], target=batch()[1]))


def send_a_wrong_shape() -> Outcome:
    """One step in which stage 1 returns what its signature does not say, at microbatch 2."""
    stages = eager_stages(schedule("1F1B"), dist.get_rank())
    (stage,) = stages
    if stage.stage_index == 1:
        original = stage.forward

        def forward(number: int, *args: Any) -> Any:
            (output,) = original(number, *args)
            return (output[:1],) if number == 2 else (output,)

        stage.forward = forward  # type: ignore[method-assign] # only of this object
    return _outcome(stages, "1F1B", lambda runner: runner.step(batch()[0], target=batch()[1]))


def fail_to_send() -> Outcome:
    """One step in which rank 1 cannot send the gradient of microbatch 1 to rank 0."""
    stages = eager_stages(schedule("1F1B"), dist.get_rank())
    original = TransferChannel.send
    num_sent = 0

    def send(self: TransferChannel, tensors: Tensors, tag: int) -> list[dist.Work]:
        nonlocal num_sent
        num_sent += 1
        if num_sent == 6:  # after F0 F1 F2 B0 F3
            raise BrokenStageError("the cable is loose")
        return original(self, tensors, tag)

    if dist.get_rank() != 1:
        return _outcome(stages, "1F1B", lambda runner: runner.step(batch()[0], target=batch()[1]))
    with mock.patch.object(TransferChannel, "send", send):
        return _outcome(stages, "1F1B", lambda runner: runner.step(batch()[0], target=batch()[1]))


def give_an_uneven_batch() -> Outcome:
    """One step whose target, on the last rank, is too short by one."""
    tokens, target = batch()
    stages = eager_stages(schedule("1F1B"), dist.get_rank())
    return _outcome(stages, "1F1B", lambda runner: runner.step(tokens, target=target[1:]))


def fail_in_evaluation() -> Outcome:
    """An evaluation in which stage 6 raises."""
    tokens, target = batch()
    stages = eager_stages(schedule("DualPipeV"), dist.get_rank())
    for stage in stages:
        if stage.stage_index == 6:
            fail_in(stage, "evaluate", 3, _raise)
    return _outcome(stages, "DualPipeV", lambda runner: runner.eval(tokens, target=target))


def wait_in_a_collective() -> Outcome:
    """Stage 0 raises while the rank of stage 3 waits in an all-reduce of its own stages' group."""
    group = dist.new_group(list(range(dist.get_world_size())))
    assert isinstance(group, dist.ProcessGroup)

    def wait_in_collective() -> None:
        dist.send(torch.ones(1), 0)
        dist.all_reduce(torch.ones(1), group=group)

    def fail_once_the_other_waits() -> None:
        dist.recv(torch.ones(1), 3)
        raise BrokenStageError("on purpose")

    stages = eager_stages(schedule("1F1B"), dist.get_rank())
    (stage,) = stages
    if stage.stage_index == 0:
        fail_in(stage, "forward", 2, fail_once_the_other_waits)
    if stage.stage_index == 3:
        fail_in(stage, "forward", 0, wait_in_collective)
    return _outcome(
        stages,
        "1F1B",
        lambda runner: runner.step(batch()[0], target=batch()[1]),
        collective_groups=[group],
    )


def _outcome(
    stages: Sequence[EagerStage],
    name: str,
    step: Callable[[GraphPPRunner], object],
    *,
    collective_groups: Sequence[dist.ProcessGroup] = (),
) -> Outcome:
    planned = schedule(name)
    tokens, target = batch()
    dist.barrier()
    runner = GraphPPRunner(
        stages, planned, collective_groups=collective_groups, timeout=timedelta(seconds=60)
    )
    start = time.monotonic()
    try:
        step(runner)
    except PipelineStepError as error:
        failure = error
    else:
        raise AssertionError("the step succeeded")
    seconds = time.monotonic() - start
    try:
        runner.step(tokens, target=target)
        refusal = ""
    except RunnerClosedError as error:
        refusal = str(error)
    num_gradients = len(gradients_of([stage.module for stage in stages]))
    discarded = all(stage.calls[-1] == "discard" and not stage.num_saved for stage in stages)
    runner.close()
    fresh = eager_stages(planned, dist.get_rank())
    with GraphPPRunner(fresh, planned) as another:
        losses = [loss.item() for loss in another.step(tokens, target=target).losses]
    return Outcome(
        error=failure,
        seconds=seconds,
        gradients=num_gradients,
        discarded=discarded,
        refusal=refusal,
        losses_of_next_runner=losses,
    )


def watch_for_a_report() -> tuple[bool, FailureReport, list[bool]]:
    """Rank 2 reports a failure of step 7, and closes nothing.

    Returns:
        Whether this rank's watch noticed, what it read, and two votes.
    """
    agreement = StepAgreement(timeout=timedelta(seconds=60))
    noticed = threading.Event()
    watch = FailureWatch(agreement, noticed.set)
    watch.start(6)
    dist.barrier()
    assert not noticed.wait(0.3)  # nobody reported anything of step 6
    watch.start(7)
    late = FailureReport(rank=dist.get_rank(), stage=0, action="0F0", reason="later")
    if dist.get_rank() == 2:
        agreement.report(7, FailureReport(rank=2, stage=5, action="5B1", reason="first"))
    seen = noticed.wait(_WATCH_SECONDS)
    dist.barrier()
    first = agreement.report(7, late)
    votes = [agreement.vote(succeeded=dist.get_rank() != 1), agreement.vote(succeeded=True)]
    watch.end()
    agreement.release()
    return seen, first, votes


_WATCH_SECONDS = 30.0


def die(rank: int, store: str, folder: str) -> None:
    """A process of four of which the one of stage 2 is killed in a backward."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, 4),  # type: ignore[attr-defined]  # exported at run time
        rank=rank,
        world_size=4,
        timeout=timedelta(seconds=60),
    )
    planned = schedule("1F1B")
    stages = eager_stages(planned, rank)
    if rank == 2:
        fail_in(stages[0], "full_backward", 3, lambda: os.kill(os.getpid(), signal.SIGKILL))
    tokens, target = batch()
    runner = GraphPPRunner(stages, planned)
    try:
        runner.step(tokens, target=target)
        text = "succeeded"
    except PipelineStepError as error:
        text = str(error)
    num_gradients = len(gradients_of([stage.module for stage in stages]))
    with open(f"{folder}/{rank}", "w") as file:
        file.write(f"{num_gradients} gradients\n{text}")
    os._exit(0)  # a group with a dead rank cannot be left in order


def train_two_pipelines(fails: bool) -> tuple[int, str]:
    """Two pipelines of two ranks each; stage 1 of the one on ranks 1 and 3 may fail.

    Returns:
        How many parameters of this rank have a gradient, and the error's text.
    """
    # As a mesh has them: every rank makes all groups.
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[dist.get_rank() % 2]
    assert isinstance(group, dist.ProcessGroup)
    planned = schedule("1F1B", num_ranks=2)
    stages = eager_stages(planned, group.rank())
    if fails and dist.get_rank() == 3:
        fail_in(stages[0], "full_backward", NUM_MICROBATCHES - 1, _raise)
    tokens, target = batch(dist.get_rank() % 2)
    text = ""
    with GraphPPRunner(stages, planned, group=group, timeout=timedelta(seconds=60)) as runner:
        try:
            runner.step(tokens, target=target)
        except PipelineStepError as error:
            text = str(error)
    return len(gradients_of([stage.module for stage in stages])), text
