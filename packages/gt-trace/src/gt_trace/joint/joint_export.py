"""Export of a module's forward and backward as one joint graph.

``aot_export_joint_with_descriptors`` (torch/_functorch/aot_autograd.py) runs the module's own
Python on fake tensors, as ``trace_step`` does, without TorchDynamo: models whose communication
depends on data (expert parallelism) and DTensor parameters go through unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.fx import Graph, GraphModule

from gt_trace._torch_internals import (
    FakeTensorMode,
    TracingContext,
    pytree,
    tracing,
)
from gt_trace._torch_joint_internals import (
    FakeScriptObject,
    JointWithDescriptors,
    OutputType,
    PlainTensorMeta,
    SubclassCreationMeta,
    aot_export_joint_with_descriptors,
    eager_kernels,
    inlined_joint_compilation,
    own_backward_annotations,
)
from gt_trace.annotate import annotate_modules
from gt_trace.capture.autocast_cache import RECAST, autocast_cache, repeated_casts
from gt_trace.capture.captured_mode import CapturedMode, with_settled_hooks
from gt_trace.capture.changed_settings import refuse_changed_settings, refuse_left_settings
from gt_trace.capture.flat_inputs import FlatInputs
from gt_trace.capture.given_tensors import GivenTensors, refuse_data_assignments
from gt_trace.capture.graph_inputs import GraphInput, InputKind, name_placeholders, with_uses
from gt_trace.capture.inherit import inherit_annotations
from gt_trace.capture.input_preparers import InputPreparer, TraceInputs
from gt_trace.capture.input_uses import InputUse
from gt_trace.capture.kernel_strides import new_fake_mode
from gt_trace.capture.live_state import LiveState
from gt_trace.capture.lost_changes import PythonChanges, with_settled_objects
from gt_trace.capture.module_state import collect_state
from gt_trace.capture.purity import (
    refuse_constants,
    refuse_data_dependence,
    refuse_side_effects,
    result_problem,
)
from gt_trace.capture.random_state import current_watch, with_untouched_generators
from gt_trace.capture.shared_inputs import refuse_dependent_inputs
from gt_trace.capture.stack_traces import memoised_stack_traces
from gt_trace.capture.stand_ins import hashed_as, liken
from gt_trace.capture.subclass_layout import PLAIN, TensorLayout, flatten_tensor
from gt_trace.capture.thread_settings import refuse_modes
from gt_trace.capture.traced_derivatives import EAGER_OPERATORS, refuse_traced_derivatives
from gt_trace.errors import CaptureError
from gt_trace.joint.joint_descriptors import (
    DescribedInput,
    DescribedResult,
    InputNames,
    described_inputs,
    described_results,
    state_names,
)
from gt_trace.joint.joint_graph import GraphResult, JointGraph, OutputSignature


def export_joint_graph(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    gradient_placements: Mapping[str, Sequence[Placement]] | None = None,
    meta_device: torch.device | str = "meta",
    input_preparers: Sequence[InputPreparer] = (),
) -> JointGraph:
    """Capture forward and backward of ``module``, called with ``args`` and ``kwargs``.

    Args:
        module: parallelized or not; its parameters may be DTensors. Its forward runs on fake
            tensors a few times, and as often again if it installed hooks of modules; no kernel
            runs. Python state which it changes (a counter, a list) is changed each time. Nodes
            traced in the forward of a submodule carry that module's name, and so do the backward
            nodes that they cause.
        args: example arguments, trees of tensors, or of numbers, strings and None, which become
            constants. Shapes are static except in dimensions marked dynamic
            (``torch._dynamo.mark_dynamic``).
        kwargs: likewise.
        gradient_placements: how the gradients of DTensor outputs are placed when they arrive, by
            the outputs' names ("output" for a single one, else as ``output['logits']``). Those not
            named are expected as the outputs are placed, and replicated where these are partial.
            What arrives otherwise is redistributed, which costs a collective.
        meta_device: what tensors on the meta device stand for, as in ``trace_step``.
        input_preparers: hooks on the inputs, see ``InputPreparer``.

    Returns:
        The joint graph.

    Raises:
        CaptureError: the module cannot be captured faithfully; every reason found is listed.
        ConstantCapturedError: a closed-over tensor would become a constant.
    """
    inputs = TraceInputs(args=args, kwargs=dict(kwargs or {}))
    device, placements = torch.device(meta_device), dict(gradient_placements or {})

    def once(changes: PythonChanges) -> JointGraph:
        return _joint_graph(module, inputs, device, placements, input_preparers, changes)

    def settled() -> JointGraph:
        return with_settled_hooks(module, lambda: with_settled_objects(module, once))

    return with_untouched_generators(settled)


def _joint_graph(
    module: nn.Module,
    inputs: TraceInputs,
    meta_device: torch.device,
    gradient_placements: dict[str, Sequence[Placement]],
    preparers: Sequence[InputPreparer],
    changes: PythonChanges,
) -> JointGraph:
    refuse_modes()
    mode = CapturedMode.now(module)
    for preparer in preparers:
        inputs = preparer.before_faking(inputs)
    flat = FlatInputs.of(module.forward, collect_state(module), inputs)
    fake_mode = new_fake_mode()
    fakes = flat.fake(fake_mode, meta_device)
    state, fake_arguments = flat.rebuild(fakes)
    shell = _Shell(module, flat, state, gradient_placements, mode, preparers, changes)
    exported = _export(shell, module, fake_arguments, fake_mode)
    graph_module = exported.graph_module
    _mark_backward(graph_module)
    inherit_annotations(graph_module)
    refuse_traced_derivatives(graph_module)
    _refuse_aliased_outputs(exported, shell)
    names = InputNames(flat)
    plain_names = [output.name for output in shell.outputs if output.is_tensor]
    described = described_inputs(graph_module, names, plain_names)
    found = described_results(graph_module, names, plain_names)
    gradient_layouts = _gradient_layouts(exported, described, found)
    results = _keep_plain(graph_module.graph, described, found)
    inputs_kept = tuple(each.meaning for each in described if each.meaning is not None)
    returned = tuple(each.meaning for each in results if each.meaning is not None)
    inputs_kept = _with_mutations(
        with_uses(inputs_kept, graph_module.graph, shell.layout_reads), returned
    )
    name_placeholders(graph_module.graph, inputs_kept)
    refuse_constants(graph_module, flat.slots)
    refuse_dependent_inputs(flat, inputs_kept, is_differentiable=True)
    graph_module.recompile()
    assert shell.output_spec is not None
    return JointGraph(
        graph_module=graph_module,
        inputs=inputs_kept,
        results=returned,
        state=tuple(slot.entry for slot in flat.slots),
        state_layouts=flat.state_layouts,
        arguments=flat.signatures(fakes),
        argument_spec=flat.argument_spec,
        example_inputs=tuple(fakes),
        fake_mode=fake_mode,
        outputs=tuple(shell.outputs),
        output_spec=shell.output_spec,
        differentiable=_differentiable(flat),
        recast=frozenset(shell.recast),
        gradient_layouts=gradient_layouts,
        mode=replace(mode.of_graph(graph_module), values=changes.values_read()),
    )


def _with_mutations(
    inputs: Sequence[GraphInput], results: Sequence[GraphResult]
) -> tuple[GraphInput, ...]:
    """Return the inputs, with those marked that are updated after the graph has run."""
    mutated = {(each.of, each.name, each.leaf) for each in results if each.kind == "mutation"}
    return tuple(
        replace(each, uses=("written", *(use for use in each.uses if use != "written")))
        if (each.kind, each.name, each.leaf) in mutated
        else each
        for each in inputs
    )


def _export(
    shell: _Shell, module: nn.Module, inputs: TraceInputs, fake_mode: FakeTensorMode
) -> JointWithDescriptors:
    leaves = pytree.tree_leaves((inputs.args, inputs.kwargs))
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    watch = current_watch()
    with watch.running(), _tracing_contexts(fake_mode, module) as stack:
        exported = aot_export_joint_with_descriptors(
            stack, shell, tensors, decompositions=EAGER_OPERATORS
        )
        watch.look()  # before AOTAutograd restores PyTorch's generators
    if not any(output.requires_grad for output in shell.outputs):
        raise CaptureError(
            "no output of the module requires a gradient, so it has no backward: capture it where "
            "gradients are enabled, with a parameter or an argument that requires one"
        )
    return exported


@contextmanager
def _tracing_contexts(fake_mode: FakeTensorMode, module: nn.Module) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        stack.enter_context(annotate_modules(module))
        stack.enter_context(tracing(TracingContext(fake_mode)))
        stack.enter_context(torch.fx.traceback.preserve_node_meta())
        stack.enter_context(own_backward_annotations())
        stack.enter_context(inlined_joint_compilation())
        stack.enter_context(eager_kernels())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(refuse_changed_settings(fake_mode))
        stack.enter_context(refuse_data_assignments({}))
        yield stack


class _Shell(nn.Module):
    """The module as AOTAutograd sees it: state and tensors in, plain tensors out.

    Each tensor of the state is registered once, however many names lead to it, since AOTAutograd
    would make a tied parameter several inputs. Constants of the argument tree stay outside, since
    it would make numbers symbolic. DTensor outputs leave as their local tensors, so that a tangent
    is a plain tensor whose placements are known.
    """

    def __init__(
        self,
        module: nn.Module,
        flat: FlatInputs,
        state: Sequence[torch.Tensor],
        gradient_placements: Mapping[str, Sequence[Placement]],
        mode: CapturedMode,
        preparers: Sequence[InputPreparer],
        changes: PythonChanges,
    ) -> None:
        super().__init__()
        self._mode = mode
        self._changes = changes
        # In a list, so that its own parameters are not registered a second time.
        self._inner = [module]
        self._gradient_placements = gradient_placements
        self._preparers = tuple(preparers)
        self.flat = flat
        self.outputs: list[OutputSignature] = []
        self.output_spec: pytree.TreeSpec | None = None
        self.recast: list[str] = []
        self.layout_reads: Mapping[str, Collection[InputUse]] = {}
        for name, slot, tensor in zip(state_names(flat), flat.slots, state, strict=True):
            holder: dict[str, Any] = (
                self._parameters if slot.entry.kind == "parameter" else self._buffers
            )
            holder[name] = tensor

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        remaining = iter(tensors)
        leaves = [a.leaf if a.layout is None else next(remaining) for a in self.flat.arguments]
        slots = zip(self.flat.slots, state_names(self.flat), strict=True)
        made = {id(slot.tensor): getattr(self, name) for slot, name in slots}
        for index, argument in enumerate(self.flat.arguments):
            if argument.layout is not None:
                leaf = liken(leaves[index], argument.leaf)
                leaves[index] = made.setdefault(id(argument.leaf), leaf)
        args, kwargs = pytree.tree_unflatten(leaves, self.flat.argument_spec)
        roots = {"module": self._inner[0], "args": args, "kwargs": kwargs}
        roots |= self.flat.attributes()
        with self._changes.undone(roots):
            result = self._run(args, kwargs, leaves)
        return self._flatten_outputs(result)

    def _run(self, args: Any, kwargs: Any, leaves: Sequence[Any]) -> Any:
        slots = self.flat.slots
        try:
            state = [getattr(self, name) for name in state_names(self.flat)]
            for slot, tensor in zip(slots, state, strict=True):
                slot.put(liken(tensor, slot.tensor))
            before = [slot.contents() for slot in slots]
            given = GivenTensors(self.flat, state, leaves)
            watch = current_watch()
            watch.follow_draws()
            with (
                memoised_stack_traces(),
                refuse_data_dependence(),
                autocast_cache(enabled=self._mode.autocast_cache),
                repeated_casts() as casts,
                hashed_as({id(a): id(b.tensor) for a, b in zip(state, slots, strict=True)}),
                LiveState(slots, state, given=given) as live,
                refuse_left_settings(),
            ):
                inputs = TraceInputs(args=args, kwargs=kwargs)
                for preparer in self._preparers:
                    inputs = preparer.inside_trace(inputs)
                result = self._inner[0](*inputs.args, **inputs.kwargs)
            watch.look()
            self._refuse_recast_state(casts)
            live.refuse_live_leaves(pytree.tree_leaves(result))
            given.refuse_changes()
            self.layout_reads = given.layout_reads
            refuse_side_effects(slots, before)
        finally:
            for slot in slots:
                slot.put(slot.tensor)
        return result

    def _refuse_recast_state(self, casts: Mapping[int, int]) -> None:
        """Refuse state that autocast would cast once; note arguments, which need not be leaves."""
        requires_grad = [
            whole.requires_grad
            for whole, layout in self.flat.tensors()
            for _ in range(layout.num_leaves)
        ]
        inputs = self.flat.graph_inputs()
        recast = {inputs[each]: count for each, count in casts.items() if requires_grad[each]}
        self.recast = [each.name for each in recast if each.kind == "argument"]
        problems = [
            f"{each.kind} {each.name} is cast {count} times"
            for each, count in recast.items()
            if each.kind != "argument"
        ]
        if problems:
            raise CaptureError(f"{RECAST}, or capture the whole step:\n  " + "\n  ".join(problems))

    def _flatten_outputs(self, result: Any) -> list[torch.Tensor]:
        with_paths, self.output_spec = pytree.tree_flatten_with_path(result)
        self.outputs = []
        plain: list[torch.Tensor] = []
        problems: list[str] = []
        first: dict[int, str] = {}
        for path, leaf in with_paths:
            name = "output" + pytree.keystr(path)
            if isinstance(leaf, torch.Tensor) and first.setdefault(id(leaf), name) != name:
                self.outputs.append(
                    OutputSignature(name=name, is_tensor=False, repeats=first[id(leaf)])
                )
                continue
            if not isinstance(leaf, torch.Tensor):
                if not isinstance(leaf, bool | int | float | complex | str | None):
                    problem = result_problem(leaf) or f"is a {type(leaf).__name__}; return tensors"
                    problems.append(f"{name} {problem}")
                self.outputs.append(OutputSignature(name=name, is_tensor=False, constant=leaf))
                continue
            layout = _real_layout(flatten_tensor(leaf)[1])
            placements: tuple[Placement, ...] | None = None
            if isinstance(leaf, DTensor):
                placements = tuple(self._gradient_placements.get(name) or _usual_placements(leaf))
                plain.append(leaf.to_local(grad_placements=placements))
            else:
                if layout.subclass is not None:
                    problems.append(f"{name} is a {layout.describe()}; return plain or DTensors")
                plain.append(leaf)
            self.outputs.append(
                OutputSignature(
                    name=name,
                    is_tensor=True,
                    requires_grad=leaf.requires_grad,
                    layout=layout,
                    gradient_placements=placements,
                )
            )
        dtensors = {o.name for o in self.outputs if o.gradient_placements is not None}
        problems += [
            f"gradient_placements names {name}, which is no DTensor output"
            for name in self._gradient_placements
            if name not in dtensors
        ]
        if problems:
            raise CaptureError(
                "the module's outputs cannot be captured:\n  " + "\n  ".join(problems)
            )
        return plain


def _usual_placements(output: DTensor) -> list[Placement]:
    return [Replicate() if placement.is_partial() else placement for placement in output.placements]


def _real_layout(layout: TensorLayout) -> TensorLayout:
    """The layout with the real mesh, where the trace holds a stand-in for it."""
    if layout.subclass is None:
        return layout
    return TensorLayout(
        subclass=layout.subclass,
        attributes=tuple((name, _real_layout(inner)) for name, inner in layout.attributes),
        constants=tuple((name, _real(value)) for name, value in layout.constants),
        context=layout.context,
        outer_size=layout.outer_size,
        outer_stride=layout.outer_stride,
        num_leaves=layout.num_leaves,
    )


def _real(value: Any) -> Any:
    return value.real_obj if isinstance(value, FakeScriptObject) else value


def _differentiable(flat: FlatInputs) -> frozenset[tuple[InputKind, str]]:
    found: set[tuple[InputKind, str]] = {
        (slot.entry.kind, slot.entry.name) for slot in flat.slots if slot.tensor.requires_grad
    }
    found |= {
        ("argument", argument.name)
        for argument in flat.arguments
        if argument.layout is not None and argument.leaf.requires_grad
    }
    return frozenset(found)


def _mark_backward(graph_module: GraphModule) -> None:
    for module in graph_module.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in module.graph.nodes:
            if node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward"):
                node.meta["autograd_backward"] = True


def _refuse_aliased_outputs(exported: JointWithDescriptors, shell: _Shell) -> None:
    aliases = (OutputType.alias_of_input, OutputType.is_input)
    views = (
        OutputType.alias_of_intermediate,
        OutputType.alias_of_intermediate_save_as_output,
        OutputType.alias_of_intermediate_base_is_user_output,
    )
    tensors = [output for output in shell.outputs if output.is_tensor]
    infos = exported._aot_state.fw_metadata.output_info
    problems = [
        f"{output.name} is an input, or a view of one; return a copy"
        for output, info in zip(tensors, infos, strict=True)
        if info.output_type in aliases
    ]
    problems += [
        f"{output.name} is a view of another output, or of the same tensor as another output, and "
        "its gradient would be lost; return a copy (.clone())"
        for output, info in zip(tensors, infos, strict=True)
        if info.output_type in views and info.requires_grad
    ]
    if problems:
        raise CaptureError("the module's outputs cannot be captured:\n  " + "\n  ".join(problems))


def _gradient_layouts(
    exported: JointWithDescriptors,
    inputs: list[DescribedInput],
    results: list[DescribedResult],
) -> dict[tuple[InputKind, str], TensorLayout]:
    """How each gradient is laid out, which need not be as its parameter is."""
    constants = {each.node: each.constant for each in inputs if each.meaning is None}
    output = exported.graph_module.graph.output_node()
    values: Any = output.args[0]
    metadata = exported._aot_graph_capture.maybe_subclass_meta
    metas = None if metadata is None else metadata.grad_input_metas
    first_gradient = next(
        (
            position
            for position, descriptor in enumerate(output.meta["desc"])
            if descriptor is None or descriptor.is_grad()
        ),
        0,
    )
    covering: dict[int, SubclassCreationMeta] = {}
    for meta in metas or ():
        if isinstance(meta, SubclassCreationMeta):
            start = first_gradient + meta.flat_tensor_start_idx
            covering |= dict.fromkeys(range(start, start + meta.arg_count), meta)
    layouts: dict[tuple[InputKind, str], TensorLayout] = {}
    for each in results:
        meaning = each.meaning
        if meaning is None or meaning.kind != "gradient" or each.value is None:
            continue
        assert meaning.of is not None
        key = (meaning.of, meaning.name)
        meta_of = covering.get(each.position)
        if meta_of is None:
            layouts[key] = PLAIN
        elif key not in layouts:
            start = first_gradient + meta_of.flat_tensor_start_idx
            layouts[key] = _layout_of(meta_of, [constants.get(v) for v in values[start:]])
    return layouts


def _layout_of(meta: SubclassCreationMeta, constants: list[Any]) -> TensorLayout:
    """The layout that AOTAutograd's record of a subclass describes.

    Args:
        meta: of one gradient.
        constants: for each of its flat parts, what it is if it is no tensor.
    """
    attributes: list[tuple[str, TensorLayout]] = []
    fixed: list[tuple[str, Any]] = []
    part = 0
    num_leaves = 0
    for name, inner in meta.attrs.items():
        if isinstance(inner, SubclassCreationMeta):
            layout = _layout_of(inner, constants[part:])
            attributes.append((name, layout))
            part += inner.arg_count
            num_leaves += layout.num_leaves
        elif isinstance(inner, PlainTensorMeta):
            attributes.append((name, PLAIN))
            part += 1
            num_leaves += 1
        else:
            fixed.append((name, constants[part]))
            part += 1
    subclass = meta.original_subclass_type or type(meta.original_subclass)
    return TensorLayout(
        subclass=subclass,
        attributes=tuple(attributes),
        constants=tuple(fixed),
        context=meta.meta,
        outer_size=_static(meta.outer_size),
        outer_stride=_static(meta.outer_stride),
        num_leaves=num_leaves,
    )


def _static(sizes: Iterable[Any]) -> tuple[int, ...]:
    found = tuple(sizes)
    if not all(isinstance(size, int) for size in found):
        raise CaptureError(f"a gradient has the dynamic extents {found}; only plain tensors may")
    return found


def _keep_plain(
    graph: Graph, inputs: list[DescribedInput], results: list[DescribedResult]
) -> list[DescribedResult]:
    """Take what is no tensor out of the graph's inputs and results.

    Raises:
        CaptureError: an operator reads such an input.
    """
    kept = [each for each in results if each.meaning is not None and each.value is not None]
    output = graph.output_node()
    descriptors = output.meta["desc"]
    output.args = (tuple(each.value for each in kept),)
    output.meta["desc"] = [descriptors[each.position] for each in kept]
    problems = []
    for each in inputs:
        if each.meaning is None:
            if each.node.users:
                user = next(iter(each.node.users))
                problems.append(f"{user.name} ({user.target}) reads {each.constant!r}")
            else:
                graph.erase_node(each.node)
    if problems:
        raise CaptureError(
            "operators read what is no tensor, and a graph of plain tensors cannot provide it:\n  "
            + "\n  ".join(problems)
        )
    return kept
