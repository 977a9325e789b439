"""Capture that hardly depends on depth: trace a few layers, stamp the others, prove it equal.

Three gates stand before a stamped capture. Layers must be built alike (``layer_difference``). They
must compute alike, and the shortened model must compute what the whole one does
(``operator_stream``). And while stamping every reference must have exactly one meaning on which two
traced layers agree (``references``). Where any of them refuses, the step is captured in full, and
the reason is reported and logged: never a partly stamped graph.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from gt_trace._torch_internals import FakeTensorMode, pytree
from gt_trace.capture.autocast_cache import autocast_cache
from gt_trace.capture.captured_mode import (
    CapturedMode,
    refuse_gradient_hooks,
    with_settled_hooks,
)
from gt_trace.capture.changed_settings import refuse_left_settings
from gt_trace.capture.flat_inputs import FlatInputs
from gt_trace.capture.input_preparers import InputPreparer, TraceInputs
from gt_trace.capture.kernel_strides import new_fake_mode
from gt_trace.capture.module_state import StateSlot, collect_state
from gt_trace.capture.python_state import PythonState
from gt_trace.capture.random_generators import ambient_generators
from gt_trace.capture.random_state import RandomWatch
from gt_trace.capture.read_values import ReadValues
from gt_trace.capture.stand_ins import eager_types
from gt_trace.capture.trace import (
    ConstantPolicy,
    trace_step,
    trace_without_code,
    tracing_contexts,
)
from gt_trace.capture.traced_step import TracedStep
from gt_trace.garbage_collection import held_garbage_collection
from gt_trace.stamping.compare_steps import step_differences
from gt_trace.stamping.layer_difference import layer_difference
from gt_trace.stamping.layer_list import (
    LayerList,
    find_layer_list,
    refuse_backward_hooks,
    refuse_shared_weights,
)
from gt_trace.stamping.layer_plan import PlannedLayers, plan_layers
from gt_trace.stamping.operator_stream import (
    record_step,
    require_equal_streams,
    require_same_when_short,
)
from gt_trace.stamping.recordings import StreamRecording, Vocabulary
from gt_trace.stamping.report import (
    NotStampable,
    ReachesTooFar,
    StampedCapture,
    StampingError,
    StampReport,
)
from gt_trace.stamping.short_graph import marked_layers
from gt_trace.stamping.stamped_step import WholeStep, stamped_step

_logger = logging.getLogger(__name__)
_MOST_WARM_UP = 2
_KNOWN_FUNCTIONS = frozenset({"torch", "gt_trace"})
_MOST_KINDS = 8
"""A layer is compared with the latest kinds of layers, and no more than this many: like layers are
near."""


def trace_step_by_stamping(
    fn: Callable[..., Any],
    *,
    module: nn.Module,
    input_preparers: Sequence[InputPreparer] = (),
    constants: ConstantPolicy = "error",
    meta_device: torch.device | str = "meta",
    fake_mode: FakeTensorMode | None = None,
    ignored_attributes: frozenset[str] = frozenset(),
    known_functions: frozenset[str] = frozenset(),
    min_layers: int = 0,
    compare: bool = False,
) -> Callable[..., StampedCapture]:
    """Capture ``fn`` as ``trace_step`` does, in a time that hardly depends on the number of layers.

    Args:
        fn: see ``trace_step``. It runs several times on fake tensors, of which two run without
            making a graph. An optimizer inside of it is not supported: capture in full.
        module: with a ``ModuleList`` or numbered ``ModuleDict`` of layers, or the capture is full.
        input_preparers: see ``trace_step``.
        constants: see ``trace_step``.
        meta_device: see ``trace_step``.
        fake_mode: see ``trace_step``.
        ignored_attributes: names of attributes of modules that no forward reads, such as
            initialisers, and that may therefore differ between layers.
        known_functions: names of packages whose ``autograd.Function`` classes do the same in the
            backward of every layer, except for what they keep in attributes of ``ctx``. No gate
            runs a backward, so that others in layers are a reason to trace all.
        min_layers: models of fewer are captured in full, which the log tells when it is at the
            level of debugging. Deeper models that cannot be stamped are an information then, and
            a warning where no least number is given, since all were to be stamped.
        compare: capture in full too, and raise if the two differ in anything.

    Returns:
        A function of the step's example arguments that returns the capture and its report. The
        step is the one that ``trace_step`` would have given: see ``step_differences``.

    Raises:
        CaptureError: see ``trace_step``.
        StampingError: ``compare`` found a difference.
    """

    def capture(*args: Any, **kwargs: Any) -> StampedCapture:
        refuse_gradient_hooks(module)  # also those of layers that are not traced

        options: dict[str, Any] = {
            "module": module,
            "input_preparers": input_preparers,
            "constants": constants,
            "meta_device": meta_device,
            "fake_mode": fake_mode,
        }
        trace_in_full = trace_step(fn, **options)
        stamper = _Stamper(
            fn=fn,
            module=module,
            preparers=input_preparers,
            meta_device=torch.device(meta_device),
            trace=trace_without_code(fn, **options),
            inputs=TraceInputs(args=args, kwargs=kwargs),
            ignored_attributes=ignored_attributes,
            known_functions=_KNOWN_FUNCTIONS | known_functions,
            min_layers=min_layers,
        )
        started = time.process_time()
        try:
            with held_garbage_collection():
                captured = with_settled_hooks(module, stamper.capture)
        except NotStampable as refusal:
            level = logging.INFO if min_layers else logging.WARNING
            if stamper.num_layers < min_layers:
                level = logging.DEBUG
            _logger.log(level, "layers are not stamped, all are traced: %s", refusal)
            begin = time.process_time()
            step = trace_in_full(*args, **kwargs)
            return StampedCapture(
                step=step,
                report=StampReport(
                    num_layers=stamper.num_layers,
                    num_layers_traced=stamper.num_layers,
                    refusal=str(refusal),
                    gate_seconds=begin - started,
                    trace_seconds=time.process_time() - begin,
                ),
            )
        if not compare:
            return captured
        traced = trace_in_full(*args, **kwargs)
        if step_differences(captured.step, traced):
            # DTensor computes some layouts by operators, once in a process, and remembers them: the
            # first of two traces has dead nodes that no later one has. Both are warm now.
            captured = stamper.capture()
        differences = step_differences(captured.step, traced)
        if differences:
            raise StampingError(
                "the stamped capture differs from the full one:\n  " + "\n  ".join(differences)
            )
        return replace(captured, report=replace(captured.report, compared=True))

    return capture


@dataclass(kw_only=True)
class _Stamper:
    """One capture."""

    fn: Callable[..., Any]
    module: nn.Module
    preparers: Sequence[InputPreparer]
    meta_device: torch.device
    trace: Callable[..., TracedStep]
    inputs: TraceInputs
    ignored_attributes: frozenset[str]
    known_functions: frozenset[str]
    min_layers: int
    num_layers: int = 0
    values: ReadValues | None = None

    def capture(self) -> StampedCapture:
        """Stamp, or raise ``NotStampable`` where the step must be captured in full."""
        begin = time.process_time()
        mode = CapturedMode.now(self.module)
        layers = find_layer_list(self.module)
        self.num_layers = len(layers)
        if len(layers) < self.min_layers:
            raise NotStampable(f"{len(layers)} layers are fewer than {self.min_layers}")
        slots = collect_state(self.module)
        refuse_shared_weights(layers, slots)
        refuse_backward_hooks(layers)
        kinds, difference = self._kinds(layers)
        try:
            plan = plan_layers(kinds)
        except NotStampable as refusal:
            raise NotStampable(f"{refusal}; {difference}" if difference else str(refusal)) from None
        inputs = self.inputs
        for preparer in self.preparers:
            inputs = preparer.before_faking(inputs)
        flat = FlatInputs.of(self.fn, slots, inputs)
        self.values = None
        recording = self._record(flat, layers, range(len(layers)), Vocabulary())
        whole = WholeStep(
            flat=flat,
            recording=recording,
            mode=replace(mode, values=self.values),
            meta_device=self.meta_device,
        )
        require_equal_streams(
            whole.recording, PlannedLayers(layers, plan), known_functions=self.known_functions
        )
        gate_seconds = time.process_time() - begin
        while True:
            try:
                begin = time.process_time() - gate_seconds
                return self._stamp(PlannedLayers(layers, plan), whole, begin)
            except ReachesTooFar:
                if plan.num_warm_up == _MOST_WARM_UP:
                    raise
                plan = plan_layers(kinds, num_warm_up=plan.num_warm_up + 1)

    def _kinds(self, layers: LayerList) -> tuple[list[int], str | None]:
        """A number for each layer, equal for those built alike; and the first difference."""
        models: list[int] = []
        kinds: list[int] = []
        first: str | None = None
        for index in range(len(layers)):
            for kind, model in reversed(list(enumerate(models))[-_MOST_KINDS:]):
                difference = layer_difference(
                    layers, model, index, ignored_attributes=self.ignored_attributes
                )
                if difference is None:
                    kinds.append(kind)
                    break
                first = first or difference
            else:
                kinds.append(len(models))
                models.append(index)
        return kinds, first

    def _stamp(self, planned: PlannedLayers, whole: WholeStep, begin: float) -> StampedCapture:
        layers, kept = planned.layers, planned.plan.kept
        with layers.shortened(kept):
            flat = FlatInputs.of(self.fn, collect_state(self.module), self.inputs)
            held = {id(slot.tensor) for slot in flat.slots}
            absent = [slot for slot in whole.flat.slots if id(slot.tensor) not in held]
            vocabulary = whole.recording.vocabulary
            short = self._record(flat, layers, kept, vocabulary, absent=absent)
            require_same_when_short(whole.recording, short, planned)
            traced_at = time.process_time()
            with marked_layers(planned) as marks, _told(layers, kept):
                step = self.trace(*self.inputs.args, **self.inputs.kwargs)
        stamped_at = time.process_time()
        made = stamped_step(step, short, marks, planned, whole)
        return StampedCapture(
            step=made,
            report=StampReport(
                num_layers=len(layers),
                num_layers_traced=len(kept),
                period=planned.plan.period,
                gate_seconds=traced_at - begin,
                trace_seconds=stamped_at - traced_at,
                stamp_seconds=time.process_time() - stamped_at,
            ),
        )

    def _record(
        self,
        flat: FlatInputs,
        layers: LayerList,
        keep: Sequence[int],
        vocabulary: Vocabulary,
        *,
        absent: Sequence[StateSlot] = (),
    ) -> StreamRecording:
        """Run the step without making a graph."""
        mode = new_fake_mode()
        shape_env = mode.shape_env
        assert shape_env is not None  # a new mode has one
        fakes = flat.fake(mode, self.meta_device)
        with ExitStack() as stack:
            stack.enter_context(tracing_contexts(mode, None))
            # What compiles itself runs as written, as in the trace.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            # No graph is made that would have to say where sizes known at run time come from.
            stack.enter_context(shape_env.ignore_fresh_unbacked_symbols())
            state, inputs = flat.rebuild(fakes)
            for preparer in self.preparers:
                inputs = preparer.inside_trace(inputs)
            leaves = pytree.tree_leaves((inputs.args, dict(inputs.kwargs)))

            watch = RandomWatch([*ambient_generators()])
            roots = {"module": self.module, "step": self.fn}
            roots |= {"args": inputs.args, "kwargs": inputs.kwargs}

            def run() -> Any:
                with (
                    _unchanged(roots, watch) as objects,
                    _swapped(flat.slots, state),
                    watch.running(),
                    autocast_cache(enabled=torch.is_autocast_cache_enabled()),
                    refuse_left_settings(),
                ):
                    result = self.fn(*inputs.args, **inputs.kwargs)
                    watch.look()
                if watch.changes:
                    raise NotStampable("the step changes a random number generator")
                self.values = self.values or ReadValues(roots, objects)  # first the whole model's
                return result

            with _told(layers, keep):
                return record_step(
                    run,
                    layers=layers,
                    keep=list(keep),
                    slots=flat.slots,
                    state=state,
                    absent=absent,
                    arguments=[leaf for leaf in leaves if isinstance(leaf, torch.Tensor)],
                    vocabulary=vocabulary,
                    fake_mode=mode,
                )


@contextmanager
def _unchanged(roots: Mapping[str, object], watch: RandomWatch) -> Iterator[PythonState]:
    """Undo the changes of Python objects that are made inside, as ``PythonState`` finds them.

    Raises:
        NotStampable: something has changed. The full trace shall find the model as it was.
    """
    state = PythonState(roots)
    watch.add(state.generators)
    changed = []
    try:
        with eager_types(state.type_readers.values()), state.noted_reads():
            yield state
        changed = state.changes()
    finally:
        state.restore()
    if changed:
        place = changed[0].holder.place(changed[0].key)
        raise NotStampable(f"the forward sets {place.removeprefix('module.')}")


@contextmanager
def _swapped(slots: Sequence[StateSlot], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """The model holds ``tensors``."""
    try:
        for slot, tensor in zip(slots, tensors, strict=True):
            slot.put(tensor)
        yield
    finally:
        for slot in slots:
            slot.put(slot.tensor)


@contextmanager
def _told(layers: LayerList, keep: Sequence[int]) -> Iterator[None]:
    """Whatever fails inside is a reason to trace all: a step that is at fault fails again."""
    try:
        yield
    except NotStampable:
        raise
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        what = f"the step fails with {type(error).__name__}: {first_line}"
        if len(keep) < len(layers):
            needs = f"the step needs all {len(layers)} layers, as a loop over their numbers does"
            what = f"{needs}: with {len(keep)}, {what}"
        raise NotStampable(what) from error
