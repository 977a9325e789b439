"""What each layer computes: the streams of operators of one forward on tensors without data.

A run of the step under fake tensors, without making a graph, is cheap even at full depth. Per layer
it records each operator with its constants and the shapes, dtypes and placements of its tensors,
where each operand came from, and the autograd nodes with what custom functions keep for their
backward. A backward is not run: whatever ``torch.autograd.grad`` is asked for, it answers with a
stand-in, by which the outputs of the step are recognised as gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gt_trace._torch_internals import (
    DisableTorchFunction,
    FakeTensorMode,
    HigherOrderOperator,
    TorchDispatchMode,
    asked_device,
    is_flex_attention,
    pytree,
)
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
    named_tensors: Mapping[str, torch.Tensor],
    vocabulary: Vocabulary,
    fake_mode: FakeTensorMode,
) -> StreamRecording:
    """Run a step, in the contexts of a trace, and record what each of the layers ``keep`` computes.

    Raises:
        NotStampable: a layer ran twice, never, or out of order; or the step does what no stream
            tells.
    """
    recorder = StreamRecorder(layers, vocabulary)
    known = KnownOperators(vocabulary.answers, fake_mode)
    for name, tensor in named_tensors.items():
        recorder.register(tensor, Origin(*layers.split(name)))
        recorder.names[id(tensor)] = name
    with ExitStack() as stack:
        for index in keep:
            handle = layers.layers[index].register_forward_pre_hook(
                recorder.entry_hook(index), prepend=True, with_kwargs=True
            )
            stack.callback(handle.remove)
        stack.enter_context(_GradientStandIns(recorder))
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


class _OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's hook is untyped
    """Sees operators above tensor subclasses and below autograd."""

    supports_higher_order_operators = True  # to refuse them with a reason

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
            if self._recorder.paused:
                return func(*args, **kwargs)
            token = self._recorder.operator(func, args, kwargs)
            operands = self._recorder.operands
            question = self._known.question(func, token, operands)
            result = None if question is None else self._known.answer(question, operands)
            if result is None:
                result = func(*args, **kwargs)
                if question is not None:
                    self._known.learn(question, operands, result)
            self._recorder.result(result)
        return result


class _GradientStandIns(TorchFunctionMode):
    """Answers ``torch.autograd.grad`` without running a backward."""

    def __init__(self, recorder: StreamRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._recorder.paused:
            return func(*args, **(kwargs or {}))
        if is_flex_attention(func):
            return self._recorder.flex_attention(func, args, kwargs or {})
        if func is torch.autograd.grad:
            outputs, inputs = args[0], args[1]
            self._recorder.close(tensor_leaves(outputs))
            return tuple(self._recorder.stand_in(each) for each in inputs)
        if func is torch.autograd.backward or func is torch.Tensor.backward:
            raise NotStampable("the step calls backward(), not torch.autograd.grad")
        if func is torch.Tensor.register_hook:
            raise NotStampable("the forward registers a hook on a tensor")
        is_asked = getattr(func, "__self__", None) is torch.Tensor.grad_fn
        if is_asked and not _is_asked_by_checkpoint():
            raise NotStampable("the forward asks for a tensor's grad_fn, which takes hooks")
        return func(*args, **(kwargs or {}))


def _is_asked_by_checkpoint() -> bool:
    """Whether activation checkpointing called a mode's function: 2.11's reads a grad_fn."""
    frame = sys._getframe(1)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "torch.utils.checkpoint"


def _few(order: list[int]) -> str:
    return str(order if len(order) <= 8 else [*order[:4], "...", *order[-3:]])
