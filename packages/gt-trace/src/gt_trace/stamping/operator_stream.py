"""What each layer computes: the streams of operators of one forward on tensors without data.

A run of the step under fake tensors, without making a graph, is cheap even at full depth. Per layer
it records each operator with its constants and the shapes, dtypes and placements of its tensors,
where each operand came from, and the autograd nodes with what custom functions keep for their
backward. A backward is not run: whatever ``torch.autograd.grad`` is asked for, it answers with a
stand-in, by which the outputs of the step are recognised as gradients.

The second gate before stamping compares these streams: between layers, and between the whole model
and the shortened one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
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
from gt_trace.stamping.layer_difference import LayerComparison
from gt_trace.stamping.layer_list import LayerList
from gt_trace.stamping.layer_plan import PlannedLayers
from gt_trace.stamping.recorder import StreamRecorder, tensor_leaves
from gt_trace.stamping.recordings import BEFORE, LayerSegment, Origin, StreamRecording, Vocabulary
from gt_trace.stamping.report import NotStampable, ReachesTooFar


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


def require_equal_streams(
    recording: StreamRecording, planned: PlannedLayers, *, known_functions: Collection[str]
) -> None:
    """All units of the interior compute the same, seen from each.

    An operand comes from the same place in all units, or from the same distance. No stream tells
    what the backward of a custom autograd function does, so that only known ones may be in a unit.

    Raises:
        NotStampable: the first difference.
    """
    layers, plan = planned.layers, planned.plan
    for layer in range(plan.layer(plan.first), plan.layer(plan.last + 1)):
        for function in recording.segments[layer].functions:
            if function.__module__.partition(".")[0] not in known_functions:
                raise NotStampable(
                    f"{layers.name(layer)} runs {function.__module__}.{function.__qualname__}, "
                    "whose backward is not known to be the same in all layers"
                )
    wanted = _wanted_gradients(recording, layers)
    for layer in range(plan.layer(plan.first + 1), plan.layer(plan.last + 1)):
        model = planned.counterpart(layer)
        if wanted.get(layer) != wanted.get(model):
            raise NotStampable(
                f"the step asks for gradients of other parameters of {layers.name(layer)} than of "
                f"{layers.name(model)}"
            )
        _compare(
            recording.segments[model],
            recording.segments[layer],
            what=f"{layers.name(layer)} computes otherwise than {layers.name(model)}",
            distance=layer - model,
            comparison=LayerComparison(layers=layers, first=model, second=layer),
            vocabulary=recording.vocabulary,
        )


def _wanted_gradients(recording: StreamRecording, layers: LayerList) -> dict[int, set[str]]:
    """For each layer: names in it of what the step returns gradients of."""
    wanted: dict[int, set[str]] = {}
    for leaf in recording.outputs:
        index, name = layers.split(leaf.gradient_of or "")
        if index is not None:
            wanted.setdefault(index, set()).add(name)
    return wanted


def require_same_when_short(
    full: StreamRecording, short: StreamRecording, planned: PlannedLayers
) -> None:
    """What the shortened model computes is what the whole one does in the same layers.

    So nothing depends on how many layers there are, or is collected over them.

    Raises:
        NotStampable: the first difference.
    """
    layers, plan = planned.layers, planned.plan
    for layer in (BEFORE, *plan.kept):
        is_last_unit = plan.unit_of(layer) == plan.last and layer != BEFORE
        where = "before the layers" if layer == BEFORE else layers.name(layer)
        if layer == plan.num_layers - 1:
            where = f"{where} and what follows"
        _compare(
            full.segments[layer],
            short.segments[layer],
            what=f"{where} computes otherwise in a model of fewer layers",
            # The unit before the last one of the interior is the first one in the short model.
            distance=-plan.num_stamped * plan.period if is_last_unit else 0,
            comparison=LayerComparison(layers=layers, first=layer, second=layer),
            vocabulary=full.vocabulary,
            too_far=layer >= plan.layer(plan.last + 1),
        )


def _compare(
    ours: LayerSegment,
    theirs: LayerSegment,
    *,
    what: str,
    distance: int,
    comparison: LayerComparison,
    vocabulary: Vocabulary,
    too_far: bool = False,
) -> None:
    """Operands come from the same place in the same layer, or in one ``distance`` layers on."""
    if ours.tokens != theirs.tokens:
        for index, (one, other) in enumerate(zip(ours.tokens, theirs.tokens, strict=False)):
            if one != other:
                names = vocabulary.name(one), vocabulary.name(other)
                raise NotStampable(
                    f"{what}: step {index} is {names[1]}, not {names[0]}"
                    if names[0] != names[1]
                    else f"{what}: {names[0]}, step {index}, has other operands"
                )
        raise NotStampable(f"{what}: {len(theirs.tokens)} steps, not {len(ours.tokens)}")
    for origin, other_origin in zip(ours.origins, theirs.origins, strict=True):
        same_layer = origin.layer == other_origin.layer or (
            origin.layer is not None
            and other_origin.layer is not None
            and other_origin.layer - origin.layer == distance
        )
        if origin.place != other_origin.place or not same_layer:
            error = ReachesTooFar if too_far else NotStampable
            raise error(f"{what}: an operand comes from elsewhere")
    for (function, held), (_, others) in zip(ours.contexts, theirs.contexts, strict=True):
        # Ours name the parameters that they gather; others may look something up by a name.
        is_ours = function is not None and function.__module__.startswith("gt_trace.")
        chosen = comparison if is_ours else replace(comparison, relative_names=False)
        found = chosen.value(" backward of a custom function", held, others)
        if found is not None:
            raise NotStampable(found)
