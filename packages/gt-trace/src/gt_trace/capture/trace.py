"""Capture of a whole training step as one graph.

Non-strict: the Python of the step runs once on fake tensors, and ``make_fx`` records every
operator below autograd, so that ``torch.autograd.grad`` inside the step becomes part of the graph.
What comes out is a pure function of plain tensors; whatever would make it impure (a closed-over
tensor, a lost ``.grad``, a re-registered buffer) is an error, not a surprise at replay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.fx import GraphModule

from gt_trace._torch_internals import (
    FakeTensorMode,
    TracingContext,
    inlined_compilation,
    lazily_generated_code,
    make_fx,
    pytree,
    tracing,
)
from gt_trace._torch_versions import non_strict_tracing, traced_backward
from gt_trace.annotate import annotate_modules
from gt_trace.capture.autocast_cache import autocast_cache
from gt_trace.capture.captured_mode import CapturedMode, refuse_gradient_hooks, with_settled_hooks
from gt_trace.capture.changed_settings import refuse_changed_settings, refuse_left_settings
from gt_trace.capture.earlier_gradients import EarlierGradients
from gt_trace.capture.flat_inputs import FlatInputs
from gt_trace.capture.given_tensors import GivenTensors
from gt_trace.capture.graph_inputs import name_placeholders, with_uses
from gt_trace.capture.inherit import inherit_annotations
from gt_trace.capture.input_preparers import InputPreparer, TraceInputs
from gt_trace.capture.input_uses import InputUse
from gt_trace.capture.kernel_strides import new_fake_mode
from gt_trace.capture.live_state import LiveState
from gt_trace.capture.lost_changes import PythonChanges, with_settled_objects
from gt_trace.capture.module_state import collect_state, parameter_names
from gt_trace.capture.optimizer_state import (
    captured_groups,
    refuse_set_hyperparameters,
    swapped_optimizer,
)
from gt_trace.capture.purity import (
    refuse_constants,
    refuse_data_dependence,
    refuse_side_effects,
    refuse_unknown_results,
)
from gt_trace.capture.random_draws import refuse_repeated_draws
from gt_trace.capture.random_state import current_watch, with_untouched_generators
from gt_trace.capture.shared_inputs import refuse_dependent_inputs
from gt_trace.capture.stack_traces import memoised_stack_traces
from gt_trace.capture.stand_ins import hashed_as
from gt_trace.capture.subclass_layout import TensorLayout, flatten_tensor
from gt_trace.capture.thread_settings import refuse_modes
from gt_trace.capture.traced_derivatives import EAGER_OPERATORS, refuse_traced_derivatives
from gt_trace.capture.traced_step import TracedStep
from gt_trace.garbage_collection import held_garbage_collection

ConstantPolicy = Literal["error", "allow"]


def trace_step(
    fn: Callable[..., Any],
    *,
    module: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    input_preparers: Sequence[InputPreparer] = (),
    constants: ConstantPolicy = "error",
    meta_device: torch.device | str = "meta",
    fake_mode: FakeTensorMode | None = None,
) -> Callable[..., TracedStep]:
    """Capture ``fn``, a training step, as one graph.

    Args:
        fn: runs forward and loss, calls ``torch.autograd.grad``, optionally steps the optimizer,
            and returns a tree of tensors. It reads ``module`` and ``optimizer`` by closure. It
            runs once, on fake tensors; no kernel runs. If it installed hooks of modules, it runs
            again, with them: the preparers' ``before_faking`` too, so that Python state which
            either changes (a counter, a list) is changed twice. It also runs again if it changed
            random number generators, or drew from some that were not found before.
        module: its parameters and buffers become the leading inputs of the graph. Nodes traced in
            the forward of a submodule carry that module's name. In-place updates of buffers are
            captured and happen at replay.
        optimizer: steps inside ``fn``; its state must exist already and must be tensors that are
            updated in place (fused or capturable optimizers, SGD). Tensors in its parameter groups,
            such as a learning rate, are state. Numbers there are constants, and a bound step
            refuses others.
        input_preparers: hooks on the inputs, see ``InputPreparer``.
        constants: what to do with a tensor that is neither state nor argument: "error" refuses,
            "allow" freezes its present value into the graph.
        meta_device: what tensors on the meta device stand for. A model too large for this
            machine is built on meta and captured as if it were on that device.
        fake_mode: of all fake values, with a shape environment. Captures whose graphs shall be
            joined to one need the same (``TracedStep.fake_mode`` of the first). None: a new one.

    Modes of the module's parts (training or evaluation), autocast, and which parameters require a
    gradient are those of the moment of capture, and the step runs in no others.

    Returns:
        A function of the step's example arguments that returns the ``TracedStep``. Arguments are
        trees whose leaves are tensors, or numbers, strings and None, which become constants.
        Shapes are static except in dimensions marked dynamic (``torch._dynamo.mark_dynamic``).
        Strides are those of the examples: other arguments are copied to them at each call, and
        computed with as eager computes with such copies.

    Raises:
        CaptureError: the step cannot be captured faithfully; every reason found is listed.
        ConstantCapturedError: a closed-over tensor would become a constant.
        ValueError: ``constants`` is neither of the two.
    """
    if constants not in get_args(ConstantPolicy):
        allowed = " or ".join(map(repr, get_args(ConstantPolicy)))
        raise ValueError(f"constants is {constants!r}; allowed: {allowed}")
    trace = trace_without_code(
        fn,
        module=module,
        optimizer=optimizer,
        input_preparers=input_preparers,
        constants=constants,
        meta_device=meta_device,
        fake_mode=fake_mode,
    )

    def capture(*args: Any, **kwargs: Any) -> TracedStep:
        step = trace(*args, **kwargs)
        lazy = step.graph_module
        return replace(step, graph_module=GraphModule(lazy, lazy.graph, type(lazy).__name__))

    return capture


def trace_without_code(
    fn: Callable[..., Any],
    *,
    module: nn.Module | None,
    optimizer: torch.optim.Optimizer | None = None,
    input_preparers: Sequence[InputPreparer] = (),
    constants: ConstantPolicy = "error",
    meta_device: torch.device | str = "meta",
    fake_mode: FakeTensorMode | None = None,
) -> Callable[..., TracedStep]:
    """``trace_step`` for a graph of which another is made: its code is generated when asked for."""

    def once(changes: PythonChanges, args: Any, kwargs: Any) -> TracedStep:
        refuse_gradient_hooks(module)
        refuse_modes()
        captured_mode = CapturedMode.now(module)
        inputs = TraceInputs(args=args, kwargs=kwargs)
        for preparer in input_preparers:
            inputs = preparer.before_faking(inputs)
        flat = FlatInputs.of(fn, collect_state(module, optimizer), inputs)
        step = _TracedFunction(fn, flat, module, optimizer, input_preparers, captured_mode, changes)
        mode = fake_mode or new_fake_mode()
        fakes = flat.fake(mode, torch.device(meta_device))
        graph_module = _traced(step, fakes, mode, module)
        if step.gradients.are_more:  # with what the next step would begin with
            graph_module = _traced(step, fakes, mode, module)
        inherit_annotations(graph_module)
        refuse_repeated_draws(graph_module)
        refuse_traced_derivatives(graph_module)
        names = with_uses(flat.graph_inputs(), graph_module.graph, step.layout_reads)
        name_placeholders(graph_module.graph, names)
        if constants == "error":
            refuse_constants(graph_module, flat.slots)
        refuse_dependent_inputs(flat, names)
        refuse_set_hyperparameters(graph_module, names)
        assert step.output_spec is not None
        return TracedStep(
            graph_module=graph_module,
            inputs=names,
            example_inputs=tuple(fakes),
            fake_mode=mode,
            state=tuple(slot.entry for slot in flat.slots),
            state_layouts=flat.state_layouts,
            arguments=flat.signatures(fakes),
            argument_spec=flat.argument_spec,
            output_spec=step.output_spec,
            output_layouts=tuple(step.output_layouts),
            mode=replace(captured_mode.of_graph(graph_module), values=changes.values_read()),
            groups=captured_groups(optimizer, parameter_names(flat.slots)),
            written_gradients=step.gradients.written,
            absent_gradients=step.gradients.absent,
        )

    def capture(*args: Any, **kwargs: Any) -> TracedStep:
        def settled() -> TracedStep:
            return with_settled_hooks(
                module,
                lambda: with_settled_objects(module, lambda changes: once(changes, args, kwargs)),
            )

        return with_untouched_generators(settled)

    return capture


@contextlib.contextmanager
def tracing_contexts(fake_mode: FakeTensorMode, module: nn.Module | None) -> Any:
    """What must be in force while a step runs to be captured; ``module`` is annotated."""
    with contextlib.ExitStack() as stack:
        if module is not None:
            stack.enter_context(annotate_modules(module))
        stack.enter_context(refuse_changed_settings(fake_mode))
        stack.enter_context(fake_mode)
        stack.enter_context(tracing(TracingContext(fake_mode)))
        stack.enter_context(torch.fx.traceback.preserve_node_meta())
        # Backward must be traced on this thread: others do not see contextual state.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(non_strict_tracing())
        stack.enter_context(traced_backward())
        stack.enter_context(inlined_compilation())
        yield


def _traced(
    step: _TracedFunction,
    fakes: Sequence[torch.Tensor],
    mode: FakeTensorMode,
    module: nn.Module | None,
) -> GraphModule:
    with held_garbage_collection(), tracing_contexts(mode, module), lazily_generated_code():
        made: GraphModule = make_fx(step, EAGER_OPERATORS, record_stack_traces=True)(*fakes)
    return made


class _TracedFunction:
    """The step as a function of plain tensors, as ``make_fx`` calls it once."""

    def __init__(
        self,
        fn: Callable[..., Any],
        flat: FlatInputs,
        module: nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        preparers: Sequence[InputPreparer],
        mode: CapturedMode,
        changes: PythonChanges,
    ) -> None:
        self._fn = fn
        self._flat = flat
        self._module = module
        self._changes = changes
        self._optimizer = optimizer
        self._preparers = preparers
        self._mode = mode
        self.gradients = EarlierGradients(flat.slots, optimizer)
        self.output_spec: pytree.TreeSpec | None = None
        self.output_layouts: list[TensorLayout | None] = []
        self.layout_reads: Mapping[str, Collection[InputUse]] = {}

    def __call__(self, *plain: torch.Tensor) -> list[Any]:
        state, inputs = self._flat.rebuild(plain)
        for preparer in self._preparers:
            inputs = preparer.inside_trace(inputs)
        slots = self._flat.slots
        traced = {id(slot.tensor): tensor for slot, tensor in zip(slots, state, strict=True)}
        roots = {
            "module": self._module,
            "step": self._fn,
            "optimizer": self._optimizer,
            "args": inputs.args,
            "kwargs": inputs.kwargs,
            **self._flat.attributes(),
        }
        with (
            self._changes.undone(roots, optimizer=self._optimizer),
            memoised_stack_traces(),
            hashed_as({id(tensor): live for live, tensor in traced.items()}),
            swapped_optimizer(self._optimizer, traced, parameter_names(slots)),
        ):
            try:
                for slot, tensor in zip(slots, state, strict=True):
                    slot.put(tensor)
                self.gradients.give(state)
                before = [slot.contents() for slot in slots]
                given = GivenTensors(
                    self._flat, state, pytree.tree_leaves((inputs.args, dict(inputs.kwargs)))
                )
                watch = current_watch()
                with (
                    watch.running(),
                    autocast_cache(enabled=self._mode.autocast_cache),
                    LiveState(slots, state, given=given),
                    refuse_data_dependence(),
                    refuse_left_settings(),
                ):
                    watch.follow_draws()
                    result = self._fn(*inputs.args, **inputs.kwargs)
                    watch.look()
                given.refuse_changes()
                self.layout_reads = given.layout_reads
                self.gradients.take(state)
                refuse_side_effects(slots, before)
            finally:
                for slot in slots:
                    slot.put(slot.tensor)
        return self._flatten_outputs(result)

    def _flatten_outputs(self, result: Any) -> list[Any]:
        refuse_unknown_results(result)
        outputs, self.output_spec = pytree.tree_flatten(result)
        self.output_layouts = []
        plain: list[Any] = []
        for output in outputs:
            if not isinstance(output, torch.Tensor):
                self.output_layouts.append(None)
                plain.append(output)
                continue
            leaves, layout = flatten_tensor(output)
            self.output_layouts.append(layout)
            plain.extend(leaves)
        return plain
