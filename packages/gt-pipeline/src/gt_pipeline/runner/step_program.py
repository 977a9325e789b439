"""A rank's action list, bound once to callables, so that running an action costs little Python.

Which stage, which microbatch, which peer, what follows locally: all of it is known from the
schedule, so it is decided when the runner is built. What is left for a step is to call the entries
in order. Each reads and writes the lists of `_Mailbox`, which has one place for each microbatch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from gt_pipeline.errors import StageOutputError
from gt_pipeline.runner.send_lifetimes import sends_done_after
from gt_pipeline.runner.stage_protocol import (
    ActivationSignature,
    MicrobatchInputs,
    PipelineStageGraphs,
    ReducesInParts,
    Tensors,
)
from gt_pipeline.runner.transfers import MAX_TENSORS, TransferChannel, Transfers
from gt_pipeline.schedules import Action, Schedule
from gt_pipeline.schedules.dependencies import transferred_by
from gt_pipeline.schedules.schedule import LoweredSchedule

_Run: TypeAlias = Callable[[], None]
_Parcel: TypeAlias = tuple[Tensors, Sequence[dist.Work]]
"""Tensors, and the transfers under way that read or fill them."""

_Forward: TypeAlias = Callable[[int, Tensors, MicrobatchInputs], Tensors]
_Backward: TypeAlias = Callable[[int, Tensors], Tensors]

_FORGOTTEN = timedelta(seconds=1)
_NOTHING: _Parcel = ((), ())


class _Mailbox:
    """What waits to be used by one stage, or to be sent by it; one place for each microbatch."""

    def __init__(self, num_microbatches: int) -> None:
        self.activations = [_NOTHING] * num_microbatches
        self.output_gradients = [_NOTHING] * num_microbatches
        # To be sent.
        self.outputs = [_NOTHING] * num_microbatches
        self.input_gradients = [_NOTHING] * num_microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """What one rank runs in a step, in order."""

    actions: tuple[Action, ...]
    runs: tuple[_Run, ...]
    """What runs each action, in order."""

    results: list[_Parcel]
    """What the last stage's forwards returned, by microbatch; empty on other ranks."""

    pending: dict[Action, _Parcel]
    """Sends that were started and not waited for."""

    waiting: tuple[list[_Parcel], ...]
    """What was made or is being received, and was not used yet, by microbatch."""

    on_host: bool
    """Whether tensors travel by gloo."""

    def take_results(self) -> tuple[Tensors, ...]:
        """``results``, which are then forgotten."""
        taken = tuple(tensors for tensors, _ in self.results)
        self.results[:] = [_NOTHING] * len(taken)
        return taken

    def finish_sends(self) -> None:
        """Wait for every send of a step all of whose actions have run."""
        for _, works in self.pending.values():
            for work in works:
                work.wait()
        self.pending.clear()

    def let_go(self) -> None:
        """Wait until nothing reads or writes tensors of this step any more.

        To be called when every rank has all that was sent to it, or when transfers are closed. So
        nothing is left to wait for, but for one thing: a send that gloo had just begun to write
        when its connection was closed is forgotten there, and never ends. It gets a second. (With
        NCCL, waiting orders streams; a limit would make the host wait too.)
        """
        for _, works in chain(self.pending.values(), *self.waiting):
            for work in works:
                with suppress(RuntimeError):  # it was closed
                    if self.on_host:
                        work.wait(_FORGOTTEN)
                    else:
                        work.wait()
        self.pending.clear()
        for parcels in self.waiting:
            parcels[:] = [_NOTHING] * len(parcels)


def bind_program(
    lowered: LoweredSchedule,
    *,
    rank: int,
    stages: Mapping[int, PipelineStageGraphs],
    inputs: list[MicrobatchInputs],
    transfers: Transfers | None,
    loss_gradient: float,
    evaluates: bool,
) -> StepProgram:
    """Bind a rank's actions.

    ``inputs`` is a list in which a step puts its microbatches before it runs; every microbatch's
    backward starts with ``loss_gradient``; where a program ``evaluates``, forwards keep nothing.
    """
    binder = _Binder(lowered.schedule, stages, inputs, transfers, loss_gradient, evaluates)
    done_after = sends_done_after(lowered, rank)
    actions = lowered.actions[rank]
    in_parts = {i: stage for i, stage in stages.items() if isinstance(stage, ReducesInParts)}
    num_parts = {index: stage.num_reduction_parts for index, stage in in_parts.items()}
    points = reduction_points(actions, num_parts)
    runs = []
    for index, action in enumerate(actions):
        run = binder.bind(action)
        for stage_index in points.get(index, ()):
            run = _then(run, in_parts[stage_index].continue_reduction)
        if index in done_after:
            run = binder.then_retire(run, done_after[index])
        runs.append(run)
    return StepProgram(
        actions=actions,
        runs=tuple(runs),
        results=binder.results,
        pending=binder.pending,
        waiting=tuple(places for box in binder.boxes.values() for places in vars(box).values()),
        on_host=next(iter(stages.values())).device.type == "cpu",
    )


@dataclass
class _Binder:
    """Makes one callable of one action; what it knows is fixed by then."""

    _schedule: Schedule
    _stages: Mapping[int, PipelineStageGraphs]
    _inputs: list[MicrobatchInputs]
    _transfers: Transfers | None
    _loss_gradient: float
    _evaluates: bool

    def __post_init__(self) -> None:
        num_microbatches = self._schedule.num_microbatches
        self.boxes = {index: _Mailbox(num_microbatches) for index in self._stages}
        self.pending: dict[Action, _Parcel] = {}
        self.results: list[_Parcel] = []
        if (last := self._stages.get(self._schedule.num_stages - 1)) is not None:
            self.results += [_NOTHING] * num_microbatches
            loss = last.output_signature[0]
            seed = torch.full((), self._loss_gradient, dtype=loss.dtype, device=last.device)
            # It waits in the place of what other stages receive, for every step anew.
            self._seed: Tensors = (seed,)

    def bind(self, action: Action) -> _Run:
        """The callable that runs an action."""
        stage = self._stages[action.stage]
        match action.kind:
            case "FORWARD":
                return self._bind_forward(action)
            case "FULL_BACKWARD":
                return self._bind_backward(action, stage.full_backward)
            case "BACKWARD_INPUT":
                return self._bind_backward(action, stage.backward_input)
            case "BACKWARD_WEIGHT":
                return functools.partial(stage.backward_weight, _microbatch(action))
            case "OVERLAP_F_B":
                return self._bind_overlap(action)
            case "SEND_F" | "SEND_B":
                return self._bind_send(action)
            case "RECV_F" | "RECV_B":
                return self._bind_receive(action)
            case "UNSHARD":
                return stage.unshard
            case "RESHARD":
                return stage.reshard
            case "REDUCE_GRAD":
                return stage.reduce_gradients

    def then_retire(self, run: _Run, sends: Sequence[Action]) -> _Run:
        """Run, then wait for sends that are complete by then and let go of their tensors."""
        pending = self.pending

        def run_and_retire() -> None:
            run()
            for send in sends:
                _, works = pending.pop(send)
                for work in works:
                    work.wait()

        return run_and_retire

    def _bind_forward(self, action: Action) -> _Run:
        stage = self._stages[action.stage]
        microbatch = _microbatch(action)
        inputs = self._inputs
        compute: _Forward = stage.evaluate if self._evaluates else stage.forward
        take = self._take_activations(action)
        give = self._give_outputs(action)

        def forward() -> None:
            give(compute(microbatch, take(), inputs[microbatch]))

        return forward

    def _bind_backward(self, action: Action, compute: _Backward) -> _Run:
        microbatch = _microbatch(action)
        take = self._take_output_gradients(action)
        give = self._give_input_gradients(action)

        def backward() -> None:
            give(compute(microbatch, take()))

        return backward

    def _bind_overlap(self, action: Action) -> _Run:
        assert action.parts is not None
        forward, backward = action.parts
        compute = self._stages[forward.stage].overlap
        backward_stage, backward_kind = self._stages[backward.stage], backward.kind
        assert backward_kind in ("FULL_BACKWARD", "BACKWARD_INPUT")
        forward_microbatch, backward_microbatch = _microbatch(forward), _microbatch(backward)
        inputs = self._inputs
        take_activations = self._take_activations(forward)
        take_gradients = self._take_output_gradients(backward)
        give_outputs = self._give_outputs(forward)
        give_gradients = self._give_input_gradients(backward)

        def overlap() -> None:
            outputs, input_gradients = compute(
                forward_microbatch,
                take_activations(),
                inputs[forward_microbatch],
                backward_stage=backward_stage,
                backward_kind=backward_kind,
                backward_microbatch=backward_microbatch,
                output_gradients=take_gradients(),
            )
            give_outputs(outputs)
            give_gradients(input_gradients)

        return overlap

    def _take_activations(self, action: Action) -> Callable[[], Tensors]:
        if action.stage == 0:
            return tuple
        return _take(self.boxes[action.stage].activations, _microbatch(action))

    def _take_output_gradients(self, action: Action) -> Callable[[], Tensors]:
        if action.stage == self._schedule.num_stages - 1:
            seed = self._seed
            return lambda: seed
        return _take(self.boxes[action.stage].output_gradients, _microbatch(action))

    def _give_outputs(self, action: Action) -> Callable[[Tensors], None]:
        if action.stage == self._schedule.num_stages - 1:
            into = self.results
        elif action.stage + 1 in self._stages:
            into = self.boxes[action.stage + 1].activations
        else:
            into = self.boxes[action.stage].outputs
        signatures = self._stages[action.stage].output_signature
        return _give(into, _microbatch(action), signatures, f"{action} returned")

    def _give_input_gradients(self, action: Action) -> Callable[[Tensors], None]:
        if action.stage == 0 or action.stage - 1 not in self._stages:
            into = self.boxes[action.stage].input_gradients
        else:
            into = self.boxes[action.stage - 1].output_gradients
        signatures = _with_gradient(self._stages[action.stage].input_signature)
        return _give(into, _microbatch(action), signatures, f"{action} returned")

    def _bind_send(self, action: Action) -> _Run:
        box = self.boxes[action.stage]
        waiting = box.outputs if action.kind == "SEND_F" else box.input_gradients
        microbatch = _microbatch(action)
        channel, tag = self._channel(action)
        pending = self.pending

        def send() -> None:
            tensors, _ = waiting[microbatch]
            waiting[microbatch] = _NOTHING
            pending[action] = (tensors, channel.send(tensors, tag))

        return send

    def _bind_receive(self, action: Action) -> _Run:
        box = self.boxes[action.stage]
        into = box.activations if action.kind == "RECV_F" else box.output_gradients
        microbatch = _microbatch(action)
        channel, tag = self._channel(action)

        def receive() -> None:
            into[microbatch] = channel.receive(tag)

        return receive

    def _channel(self, action: Action) -> tuple[TransferChannel, int]:
        """How the product of a send or a receive travels, and its tag."""
        assert self._transfers is not None
        product = transferred_by(action)
        stage = self._stages[action.stage]
        sent_forward = product.direction == "forward"
        # Neighbours agree on signatures, so this stage's own say what travels.
        signatures: Sequence[ActivationSignature]
        if sent_forward == action.is_send:
            signatures = stage.output_signature
        else:
            signatures = stage.input_signature
        if not sent_forward:
            signatures = _with_gradient(signatures)
        other = product.consumer_stage if action.is_send else product.stage
        peer = self._schedule.stage_to_rank[other]
        channel = self._transfers.channel(peer, signatures, stage.device, sends=action.is_send)
        # Unique among the products of a step, on every rank alike.
        place = product.stage * self._schedule.num_microbatches + product.microbatch
        return channel, (2 * place + sent_forward) * MAX_TENSORS


def _then(first: _Run, second: _Run) -> _Run:
    def both() -> None:
        first()
        second()

    return both


def _take(places: list[_Parcel], microbatch: int) -> Callable[[], Tensors]:
    def take() -> Tensors:
        tensors, works = places[microbatch]
        for work in works:
            work.wait()
        places[microbatch] = _NOTHING
        return tensors

    return take


def _give(
    into: list[_Parcel], microbatch: int, signatures: Sequence[ActivationSignature], what: str
) -> Callable[[Tensors], None]:
    """Hand tensors over, contiguous, after a look at their sizes: a wrong one would not arrive."""
    layouts = [(each.shape, each.dtype) for each in signatures]
    num_tensors = len(layouts)

    def give(tensors: Tensors) -> None:
        if len(tensors) != num_tensors:
            raise _wrong_outputs(tensors, signatures, what)
        for tensor, (shape, dtype) in zip(tensors, layouts, strict=True):
            if tensor.shape != shape or tensor.dtype != dtype:
                raise _wrong_outputs(tensors, signatures, what)
        # A tensor that is contiguous already stays the same one.
        into[microbatch] = (tuple([each.contiguous() for each in tensors]), ())

    return give


def _wrong_outputs(
    tensors: Sequence[Tensor], signatures: Sequence[ActivationSignature], what: str
) -> StageOutputError:
    returned = [f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in tensors]
    return StageOutputError(
        what=f"{what} other tensors than its signature says",
        problems=[
            f"returned: {', '.join(returned) or 'none'}",
            f"signature: {', '.join(str(each) for each in signatures) or 'none'}",
        ],
    )


def _with_gradient(signatures: Sequence[ActivationSignature]) -> tuple[ActivationSignature, ...]:
    return tuple(each for each in signatures if each.requires_grad)


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch


# Where a reduction that was launched goes on, read off a rank's list.
#
# A reduction over replicas needs what the reduction over shards made. Waiting for the first right
# behind its launch would stall the rank; leaving both to the end of the step would hide only the
# first. So the parts are spread evenly over what the rank still computes; the last is waited for at
# the end::
#
#     0REDUCE_GRAD  1I2  1I3  1W0  1W1  1W2  1W3  end of the step
#     reduce-scatter          wait, all-reduce    wait
def reduction_points(
    actions: Sequence[Action], num_parts: Mapping[int, int]
) -> dict[int, tuple[int, ...]]:
    """Stages whose reduction goes on behind an action, by the action's place in the list.

    Args:
        actions: of one rank.
        num_parts: of each stage's reduction, its launch included.
    """
    points: dict[int, tuple[int, ...]] = {}
    for place, action in enumerate(actions):
        if action.kind != "REDUCE_GRAD":
            continue
        following = [later for later in range(place + 1, len(actions)) if _computes(actions[later])]
        num_waits = num_parts.get(action.stage, 1) - 1
        for wait in range(1, num_waits if following else 0):
            later = following[math.ceil(len(following) * wait / num_waits) - 1]
            points[later] = (*points.get(later, ()), action.stage)
    return points


def _computes(action: Action) -> bool:
    """Whether it takes time: nobody waits for gradients of the first stage's inputs."""
    return action.is_compute and (action.kind, action.stage) != ("BACKWARD_INPUT", 0)
