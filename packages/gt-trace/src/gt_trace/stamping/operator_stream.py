"""What each layer computes: the streams of operators of one forward on tensors without data.

A run of the step under fake tensors, without making a graph, is cheap even at full depth. Per layer
it records each operator with its constants and the shapes, dtypes and placements of its tensors,
where each operand came from, and the autograd nodes with what custom functions keep for their
backward. A backward is not run: whatever ``torch.autograd.grad`` is asked for, it answers with a
stand-in, by which the outputs of the step are recognised as gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from gt_trace._torch_internals import (
    DisableTorchFunction,
    FakeTensorMode,
    HigherOrderOperator,
    TorchDispatchMode,
    asked_device,
    is_flex_attention,
    pytree,
)
from gt_trace.capture.live_state import LiveState
from gt_trace.capture.module_state import StateSlot
from gt_trace.stamping.known_operators import KnownOperators
from gt_trace.stamping.layer_list import LayerList
from gt_trace.stamping.recorder import StreamRecorder, tensor_leaves
from gt_trace.stamping.recordings import Origin, StreamRecording, Vocabulary
from gt_trace.stamping.report import NotStampable


def record_step(
    run: Callable[[], Any],
    *,
    layers: LayerList,
    keep: Sequence[int],
    slots: Sequence[StateSlot],
    state: Sequence[torch.Tensor],
    absent: Sequence[StateSlot],
    arguments: Sequence[torch.Tensor],
    vocabulary: Vocabulary,
    fake_mode: FakeTensorMode,
) -> StreamRecording:
    """Run a step, in the contexts of a trace, and record what each of the layers ``keep`` computes.

    Args:
        run: the step, with the module's state replaced by ``state``.
        layers: the model's.
        keep: which of them the module holds now.
        slots: where the state lives.
        state: stand-ins of the state, one for each slot.
        absent: state of layers that the module does not hold now.
        arguments: tensors that the step is given.
        vocabulary: of this recording and those that it is compared with.
        fake_mode: of all these tensors.

    Raises:
        NotStampable: a layer ran twice, never, or out of order; or the step does what no stream
            tells.
    """
    recorder = StreamRecorder(layers, vocabulary)
    known = KnownOperators(vocabulary.answers, fake_mode)
    named = {slot.entry.name: each for slot, each in zip(slots, state, strict=True)}
    named |= {f"argument {index}": each for index, each in enumerate(arguments)}
    for name, tensor in named.items():
        recorder.register(tensor, Origin(*layers.split(name)))
        recorder.names[id(tensor)] = name
    with ExitStack() as stack:
        for index in keep:
            handle = layers.layers[index].register_forward_pre_hook(
                recorder.entry_hook(index), prepend=True, with_kwargs=True
            )
            stack.callback(handle.remove)
        stack.enter_context(_RecordedFunctions(recorder, known, slots, state, absent=absent))
        stack.enter_context(_OperatorMode(recorder, known))
        result = run()
        leaves, spec = pytree.tree_flatten(result)
        recorder.close([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
    if recorder.order != list(keep):
        raise NotStampable(
            f"the layers ran in the order {_few(recorder.order)}, not {_few(list(keep))}"
        )
    return StreamRecording(
        segments=recorder.segments,
        outputs=tuple(recorder.output(leaf) for leaf in leaves),
        output_spec=spec,
        vocabulary=vocabulary,
    )


_SEEN_OFTEN = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "requires_grad", "ndim", "device", "layout", "_version")
)
"""Readings of what a tensor is, half of all torch functions that a model calls."""


class _OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's hook is untyped
    """Sees operators above tensor subclasses and below autograd."""

    supports_higher_order_operators = True  # to refuse them with a reason

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled while a step is recorded, so that Dynamo need not be kept out."""
        return False

    def __init__(self, recorder: StreamRecorder, known: KnownOperators) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._recorder = recorder
        self._known = known

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if isinstance(func, HigherOrderOperator) and not self._recorder.paused:
            name: str = func.name()  # type: ignore[no-untyped-call]  # torch's
            raise NotStampable(f"{name} has a graph of its own, which is not stamped")
        device = asked_device(func, args)
        if device is not None:
            return device
        kwargs = kwargs or {}
        with DisableTorchFunction():
            recorder = self._recorder
            if recorder.paused:
                return func(*args, **kwargs)
            token = recorder.operator(func, args, kwargs)
            operands = recorder.operands
            sizes = recorder.segments[recorder.current].sizes if recorder.has_sizes else None
            is_sized = kwargs.get("output_size") is not None
            question = self._known.question(func, token, operands, sizes, is_sized=is_sized)
            result = None if question is None else self._known.answer(question, operands, sizes)
            if result is None:
                before = self._known.before(question, sizes)
                result = func(*args, **kwargs)
                if question is not None:
                    self._known.learn(question, operands, result, sizes, before)
            recorder.result(result)
        return result


class _RecordedFunctions(LiveState):
    """Answers ``torch.autograd.grad`` without running a backward, and refuses what hides from it.

    Args:
        recorder: of the run.
        known: of the run.
        slots: where the state lives.
        stand_ins: one for each slot.
        absent: state for which there is no stand-in.
    """

    def __init__(
        self,
        recorder: StreamRecorder,
        known: KnownOperators,
        slots: Sequence[StateSlot],
        stand_ins: Sequence[torch.Tensor],
        *,
        absent: Sequence[StateSlot],
    ) -> None:
        super().__init__(slots, stand_ins, absent=absent)
        self._recorder = recorder
        self._known = known

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what a layer computes by; do in place of a backward what a recording needs."""
        if self._recorder.paused or func in _SEEN_OFTEN:
            return func(*args, **kwargs)
        if is_flex_attention(func):
            return self._recorder.flex_attention(func, args, kwargs)
        if func is torch.autograd.grad:
            outputs, inputs = args[0], args[1]
            self._recorder.close(tensor_leaves(outputs))
            return tuple(self._recorder.stand_in(each, self._known) for each in inputs)
        if func is torch.autograd.backward or func is torch.Tensor.backward:
            raise NotStampable("the step calls backward(), not torch.autograd.grad")
        if func is torch.Tensor.register_hook:
            raise NotStampable("the forward registers a hook on a tensor")
        is_asked = getattr(func, "__self__", None) is torch.Tensor.grad_fn
        if is_asked and not _is_asked_by_checkpoint():
            raise NotStampable("the forward asks for a tensor's grad_fn, which takes hooks")
        return func(*args, **kwargs)


def _is_asked_by_checkpoint() -> bool:
    """Whether activation checkpointing called a mode's function: 2.11's reads a grad_fn."""
    frame = sys._getframe(2)  # what called ``call``
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "torch.utils.checkpoint"


def _few(order: list[int]) -> str:
    return str(order if len(order) <= 8 else [*order[:4], "...", *order[-3:]])
