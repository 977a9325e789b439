"""A rank's action list, bound once to callables, so that running an action costs little Python.

Which stage, which microbatch, which peer, what follows locally: all of it is known from the
schedule, so it is decided when the runner is built. What is left for a step is to call the entries
in order. Each reads and writes the lists of `_Mailbox`, which has one place for each microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
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
    Tensors,
)
from gt_pipeline.runner.transfers import MAX_TENSORS, TransferChannel, Transfers
from gt_pipeline.schedules import Action
from gt_pipeline.schedules.dependencies import transferred_by
from gt_pipeline.schedules.schedule import LoweredSchedule

_Run: TypeAlias = Callable[[], None]
_Works: TypeAlias = list[dist.Work]
_Forward: TypeAlias = Callable[[int, Tensors, MicrobatchInputs], Tensors]
_Backward: TypeAlias = Callable[[int, Tensors], Tensors]

_FORGOTTEN = timedelta(seconds=1)


class _Mailbox:
    """What waits to be used by one stage, or to be sent by it; one place for each microbatch."""

    __slots__ = (
        "activation_works",
        "activations",
        "input_gradients",
        "output_gradient_works",
        "output_gradients",
        "outputs",
    )

    def __init__(self, num_microbatches: int) -> None:
        self.activations: list[Tensors] = [()] * num_microbatches
        self.output_gradients: list[Tensors] = [()] * num_microbatches
        # Of receives that fill the two above; empty where a product is handed over locally.
        self.activation_works: list[_Works] = [[] for _ in range(num_microbatches)]
        self.output_gradient_works: list[_Works] = [[] for _ in range(num_microbatches)]
        # To be sent.
        self.outputs: list[Tensors] = [()] * num_microbatches
        self.input_gradients: list[Tensors] = [()] * num_microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """What one rank runs in a step, in order."""

    actions: tuple[Action, ...]
    runs: tuple[_Run, ...]
    """What runs each action, in order."""

    results: list[Tensors]
    """What the last stage's forwards returned, by microbatch; empty on other ranks."""

    pending: dict[Action, tuple[_Works, Tensors]]
    """Sends that were started and not waited for, with what they send."""

    receiving: tuple[list[_Works], ...]
    """Receives that were started and not waited for."""

    on_host: bool
    """Whether tensors travel by gloo."""

    waiting: tuple[list[Tensors], ...]
    """Tensors that were made and not used yet, by microbatch."""

    def let_go(self) -> None:
        """Wait until nothing reads or writes tensors of this step any more.

        To be called when every rank has all that was sent to it, or when transfers are closed. So
        nothing is left to wait for, but for one thing: a send that gloo had just begun to write
        when its connection was closed is forgotten there, and never ends. It gets a second. (With
        NCCL, waiting orders streams; a limit would make the host wait too.)
        """
        under_way = [works for works, _ in self.pending.values()]
        under_way += [works for each in self.receiving for works in each]
        for works in under_way:
            for work in works:
                with suppress(RuntimeError):  # it was closed
                    if self.on_host:
                        work.wait(_FORGOTTEN)
                    else:
                        work.wait()
        self.pending.clear()
        for tensors in self.waiting:
            tensors[:] = [()] * len(tensors)


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

    Args:
        lowered: the schedule; of evaluation, one without backwards.
        rank: in the pipeline.
        stages: of this rank, by index.
        inputs: a list in which a step puts its microbatches before it runs.
        transfers: None where all stages are on this rank.
        loss_gradient: what every microbatch's backward starts with.
        evaluates: whether forwards keep nothing for a backward.
    """
    binder = _Binder(lowered, rank, stages, inputs, transfers, loss_gradient, evaluates)
    done_after = sends_done_after(lowered, rank)
    actions = lowered.actions[rank]
    runs = []
    for index, action in enumerate(actions):
        run = binder.bind(action)
        if index in done_after:
            run = binder.then_retire(run, done_after[index])
        runs.append(run)
    return StepProgram(
        actions=actions,
        runs=tuple(runs),
        results=binder.results,
        pending=binder.pending,
        receiving=tuple(
            works
            for box in binder.boxes.values()
            for works in (box.activation_works, box.output_gradient_works)
        ),
        on_host=next(iter(stages.values())).device.type == "cpu",
        waiting=tuple(
            tensors
            for box in binder.boxes.values()
            for tensors in (
                box.activations,
                box.output_gradients,
                box.outputs,
                box.input_gradients,
            )
        ),
    )


class _Binder:
    """Makes one callable of one action; what it knows is fixed by then."""

    def __init__(
        self,
        lowered: LoweredSchedule,
        rank: int,
        stages: Mapping[int, PipelineStageGraphs],
        inputs: list[MicrobatchInputs],
        transfers: Transfers | None,
        loss_gradient: float,
        evaluates: bool,
    ) -> None:
        self._schedule = lowered.schedule
        self._rank = rank
        self._stages = stages
        self._inputs = inputs
        self._transfers = transfers
        self._evaluates = evaluates
        num_microbatches = lowered.schedule.num_microbatches
        self.boxes = {index: _Mailbox(num_microbatches) for index in stages}
        self.pending: dict[Action, tuple[_Works, Tensors]] = {}
        self.results: list[Tensors] = []
        if (last := stages.get(self._schedule.num_stages - 1)) is not None:
            self.results += [()] * num_microbatches
            loss = last.output_signature[0]
            seed = torch.full((), loss_gradient, dtype=loss.dtype, device=last.device)
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
                return self._bind_backward_weight(action)
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
                works, _ = pending.pop(send)
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

    def _bind_backward_weight(self, action: Action) -> _Run:
        compute = self._stages[action.stage].backward_weight
        microbatch = _microbatch(action)

        def backward_weight() -> None:
            compute(microbatch)

        return backward_weight

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
        box = self.boxes[action.stage]
        return _take(box.activations, box.activation_works, _microbatch(action))

    def _take_output_gradients(self, action: Action) -> Callable[[], Tensors]:
        if action.stage == self._schedule.num_stages - 1:
            seed = self._seed
            return lambda: seed
        box = self.boxes[action.stage]
        return _take(box.output_gradients, box.output_gradient_works, _microbatch(action))

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
            tensors = waiting[microbatch]
            waiting[microbatch] = ()
            pending[action] = (channel.send(tensors, tag), tensors)

        return send

    def _bind_receive(self, action: Action) -> _Run:
        box = self.boxes[action.stage]
        if action.kind == "RECV_F":
            into, all_works = box.activations, box.activation_works
        else:
            into, all_works = box.output_gradients, box.output_gradient_works
        microbatch = _microbatch(action)
        channel, tag = self._channel(action)

        def receive() -> None:
            into[microbatch], all_works[microbatch] = channel.receive(tag)

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
        make = self._transfers.channel_to if action.is_send else self._transfers.channel_from
        channel = make(peer, signatures, stage.device)
        # Unique among the products of a step, on every rank alike.
        place = product.stage * self._schedule.num_microbatches + product.microbatch
        return channel, (2 * place + sent_forward) * MAX_TENSORS


def _take(
    tensors: list[Tensors], all_works: list[_Works], microbatch: int
) -> Callable[[], Tensors]:
    def take() -> Tensors:
        for work in all_works[microbatch]:
            work.wait()
        all_works[microbatch] = []
        taken = tensors[microbatch]
        tensors[microbatch] = ()
        return taken

    return take


def _give(
    into: list[Tensors], microbatch: int, signatures: Sequence[ActivationSignature], what: str
) -> Callable[[Tensors], None]:
    """Hand tensors over, contiguous, after a look at their sizes: a wrong one would not arrive."""
    layouts = [(each.shape, each.dtype) for each in signatures]
    num_tensors = len(layouts)

    def give(tensors: Tensors) -> None:
        if len(tensors) != num_tensors:
            raise _wrong_outputs(tensors, signatures, what)
        handed = []
        for tensor, (shape, dtype) in zip(tensors, layouts, strict=True):
            if tensor.shape != shape or tensor.dtype != dtype:
                raise _wrong_outputs(tensors, signatures, what)
            handed.append(tensor if tensor.is_contiguous() else tensor.contiguous())
        into[microbatch] = tuple(handed)

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
