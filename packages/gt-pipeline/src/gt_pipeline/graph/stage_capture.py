"""Capture of one pipeline stage: one microbatch's forward and backward as one graph.

The step that is captured is a vector-Jacobian product: of parameters, what enters the stage, and
the gradients of what leaves it, it makes what leaves, the gradients of what entered, and those of
the parameters. The last stage has the loss inside. One microbatch stands for all; it consists of
shapes, and no kernel runs for it. ``gt_trace.trace_step`` records it, so that a stage's operators,
annotations and bits are those of a whole step's (docs/decisions/0011-stage-graphs.md).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gt_pipeline.errors import StageCaptureError
from gt_pipeline.graph._torch_internals import FakeTensorMode, pytree
from gt_pipeline.graph.activations import (
    ActivationPlacement,
    example_of,
    placement_of,
    repetitions,
    signature_of,
    travelling,
    travelling_gradient,
)
from gt_pipeline.graph.clean_up import clean_up
from gt_pipeline.graph.slots import Slot, SlotKind
from gt_pipeline.runner.stage_protocol import ActivationSignature, MicrobatchInputs
from gt_trace import GraphInput, InputPreparer, TensorLayout, TracedStep, phase, trace_step
from gt_trace.capture.captured_mode import ACCUMULATION_HOOKS, GRADIENT_HOOKS, hook_problems
from gt_trace.capture.kernel_strides import new_fake_mode

_logger = logging.getLogger(__name__)

LOST_HOOKS = (GRADIENT_HOOKS, ACCUMULATION_HOOKS)
"""Kinds of hooks of parameters that do not run: no graph runs them, and a runner adds gradients to
parameters without autograd."""

StageLoss = Callable[[Any, Any], Any]
"""A function of what the module returns and the target. It returns the loss of one microbatch, of
shape (), alone or first in a tuple of tensors; the others are returned to the caller beside the
loss, without gradient."""

StageTracer = Callable[..., Callable[..., TracedStep]]
"""``gt_trace.trace_step``, or what takes the same arguments and gives the same step. It may run the
function more than once, also while the module lacks some of its layers, as stamping does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCapture:
    """A stage's joint graph, and what goes in and out."""

    traced: TracedStep
    """The joint graph. Passes that need forward and backward together (memory policies, chunks for
    EP overlap) edit it before it is cut."""

    stage_index: int
    num_stages: int
    input_signature: tuple[ActivationSignature, ...]
    output_signature: tuple[ActivationSignature, ...]
    output_placements: tuple[ActivationPlacement | None, ...]
    """How outputs that are DTensors are placed; None for plain ones."""

    inputs: tuple[Slot, ...]
    """What each placeholder of the graph is."""

    results: tuple[Slot | None, ...]
    """What each output of the graph is; None where there is no gradient."""

    kwarg_names: tuple[str, ...]
    """Keyword arguments of the module's forward that the microbatch brought."""

    left_out: Mapping[str, Any]
    """Further keyword arguments that the module's forward could take, and its defaults for them."""

    takes_any_kwargs: bool
    """Whether the module's forward takes keyword arguments by any name."""

    has_target: bool
    """Whether the loss is inside, and the graph takes the microbatch's target."""

    differentiates: bool
    """Whether there is a backward."""

    gradient_layouts: Mapping[str, TensorLayout] = field(default_factory=dict)
    """How each parameter's gradient is made of plain tensors, by the parameter's name; those
    without gradient are missing."""

    @property
    def known_kwargs(self) -> frozenset[str] | None:
        """Keyword arguments that the module's forward can take; None: by any name."""
        if self.takes_any_kwargs:
            return None
        return frozenset(self.kwarg_names) | frozenset(self.left_out)


def capture_stage(
    module: nn.Module,
    *,
    stage_index: int,
    num_stages: int,
    activations: Sequence[Tensor | ActivationSignature] = (),
    inputs: MicrobatchInputs | None = None,
    loss_fn: StageLoss | None = None,
    device: torch.device | str = "cpu",
    differentiate: bool = True,
    input_preparers: Sequence[InputPreparer] = (),
    fake_mode: FakeTensorMode | None = None,
    verify: bool = True,
    trace: StageTracer = trace_step,
) -> StageCapture:
    """Capture forward and backward of a stage for one microbatch.

    Args:
        module: the stage's part of the model, parallelized or not; parameters may be on meta.
        stage_index: position in the model, from 0.
        num_stages: of the whole pipeline.
        activations: what the stage before sends, or only its shapes and dtypes; empty for the first
            stage. They become the module's leading positional arguments. DTensors travel as their
            local tensors: give ``ActivationPlacement.example`` here.
        inputs: a microbatch as the runner gives it, of real tensors or such on meta. The stage
            takes what concerns it: the first stage ``args``, every stage the ``kwargs`` that its
            module accepts, one with a loss ``target``.
        loss_fn: of the last stage: becomes part of its forward. None for a last stage that returns
            what its module returns.
        device: what tensors on meta stand for.
        differentiate: whether to capture a backward; False for evaluation.
        input_preparers: as for ``gt_trace.trace_step``.
        fake_mode: as for ``gt_trace.trace_step``; the same for all stages of a rank, so that their
            graphs can overlap.
        verify: whether to verify the graph, as captured and cleaned up.
        trace: captures the functions of the stage.

    Raises:
        StageCaptureError: the stage has not the form of one, or parameters have hooks; every reason
            is listed.
        gt_trace.CaptureError: it cannot be captured faithfully.
        gt_passes.VerificationError: the graph is broken.
    """
    microbatch = inputs or MicrobatchInputs()
    problems = _layout_problems(stage_index, num_stages, activations, loss_fn)
    problems += hook_problems(module, LOST_HOOKS)
    if problems:
        raise StageCaptureError(what=f"stage {stage_index} cannot be captured", problems=problems)
    fake_mode = fake_mode or new_fake_mode()
    entering = tuple(example_of(activation) for activation in activations)
    repeats = repetitions(activations)
    for example, first in zip(entering, repeats, strict=True):
        if first is not None:
            example.requires_grad_(False)
    args = microbatch.args if stage_index == 0 else ()
    defaults, takes_any_kwargs = _accepted_kwargs(module)
    kwargs = {n: v for n, v in microbatch.kwargs.items() if takes_any_kwargs or n in defaults}
    target = microbatch.target if loss_fn is not None else None
    stage = _Stage(module, loss_fn, stage_index, repeats)

    capture = trace(
        stage.run,
        module=module,
        input_preparers=input_preparers,
        meta_device=device,
        fake_mode=fake_mode,
    )
    # What leaves the stage is known after its forward, and the gradients of that enter the graph.
    # An evaluation records no gradient that its forward computes on the side, as chunked losses do.
    with torch.set_grad_enabled(differentiate):
        traced = capture(entering, args, kwargs, target, ())
    dynamic = [each.name for each in traced.arguments if None in each.shape]
    if dynamic:
        raise StageCaptureError(
            what=f"stage {stage_index} cannot be captured",
            problems=[f"{name} has a dynamic size; microbatches are alike" for name in dynamic],
        )
    if differentiate:
        arriving = tuple(
            torch.empty(each.shape, dtype=each.dtype, device="meta")
            for each in stage.output_signature
            if each.requires_grad
        )
        stage.differentiates = True
        with torch.enable_grad():
            traced = capture(entering, args, kwargs, target, arriving)
    clean_up(traced, verify=verify)
    results = tuple(_result_slots(traced, stage))
    kinds: list[SlotKind] = ["output", "input_gradient"] if loss_fn is None else ["input_gradient"]
    _warn_of_layouts(traced, results, kinds)
    return StageCapture(
        traced=traced,
        stage_index=stage_index,
        num_stages=num_stages,
        input_signature=tuple(map(signature_of, entering, repeats)),
        output_signature=stage.output_signature,
        output_placements=stage.output_placements,
        inputs=tuple(map(input_slot, traced.inputs)),
        results=results,
        kwarg_names=tuple(kwargs),
        left_out={n: default for n, default in defaults.items() if n not in kwargs},
        takes_any_kwargs=takes_any_kwargs,
        has_target=loss_fn is not None,
        differentiates=differentiate,
        gradient_layouts=_gradient_layouts(traced, stage),
    )


def _warn_of_layouts(
    traced: TracedStep, results: Sequence[Slot | None], kinds: Collection[SlotKind]
) -> None:
    """Say which tensors reach the neighbouring stage in other strides than in the whole model."""
    values: Any = traced.graph_module.graph.output_node().args[0]
    strided = [
        f"{slot.name} with strides {tuple(node.meta['val'].stride())}"
        for slot, node in zip(results, values, strict=True)
        if slot is not None and slot.kind in kinds and not node.meta["val"].is_contiguous()
    ]
    if strided:
        _logger.warning(
            "a stage returns %s. Tensors travel contiguous between stages, so that later kernels "
            "may differ from those of the whole model in the last bits. To exclude that, make "
            "outputs contiguous in the module, and gradients of activations by "
            "activation.register_hook(torch.Tensor.contiguous)",
            ", ".join(strided),
        )


class _Stage:
    """The functions that are traced, and what they find out about the stage."""

    def __init__(
        self,
        module: nn.Module,
        loss_fn: StageLoss | None,
        stage_index: int,
        repeats: Sequence[int | None],
    ) -> None:
        self._repeats = repeats
        self._module = module
        self._loss_fn = loss_fn
        self._stage_index = stage_index
        self.output_signature: tuple[ActivationSignature, ...] = ()
        self.output_placements: tuple[ActivationPlacement | None, ...] = ()
        self.differentiates = False
        self.num_input_gradients = 0
        self._all_parameters = tuple(_differentiable(module))  # ``run`` may see some layers only
        self.parameter_names: tuple[str, ...] = ()
        """Names of the parameters that gradients are asked for."""

    def run(
        self,
        activations: tuple[Tensor, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        output_gradients: tuple[Tensor, ...],
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
        """What leaves, the gradients of what entered, and those of the parameters.

        Without gradients if it does not differentiate.
        """
        outputs = self._forward(activations, args, kwargs, target)
        if not self.differentiates:
            return outputs, [], []
        named = _differentiable(self._module)
        entered = [each for each in activations if each.requires_grad]
        differentiable = [
            output
            for output, each in zip(outputs, self.output_signature, strict=True)
            if each.requires_grad
        ]
        self.parameter_names = self._all_parameters
        self.num_input_gradients = len(entered)
        wanted = [*entered, *named.values()]
        gradients: Sequence[Tensor | None] = [None] * len(wanted)
        if differentiable and wanted:
            gradients = torch.autograd.grad(
                differentiable, wanted, output_gradients, allow_unused=True
            )
        self._refuse_unused(activations, dict(zip(map(id, entered), gradients, strict=False)))
        with phase("backward"):
            leaving = [
                travelling_gradient(activation, gradient)
                for activation, gradient in zip(entered, gradients, strict=False)
                if gradient is not None
            ]
        return outputs, leaving, list(gradients[len(entered) :])

    def _forward(
        self, activations: tuple[Tensor, ...], args: Any, kwargs: dict[str, Any], target: Any
    ) -> list[Tensor]:
        """What leaves the stage, as plain tensors."""
        same = [
            activation if first is None else activations[first]
            for activation, first in zip(activations, self._repeats, strict=True)
        ]
        result = self._module(*same, *args, **kwargs)
        if self._loss_fn is not None:
            with phase("loss"):
                result = self._loss_fn(result, target)
        leaves = pytree.tree_leaves(result)
        problems = _structure_problems(result) or self._result_problems(leaves)
        if problems:
            raise StageCaptureError(
                what=f"stage {self._stage_index} cannot be captured", problems=problems
            )
        outputs = [travelling(leaf) for leaf in leaves]
        if self._loss_fn is not None:
            outputs = [outputs[0], *(each.detach() for each in outputs[1:])]
        # What is returned beside a loss goes to the caller.
        repeats = repetitions(leaves) if self._loss_fn is None else [None] * len(leaves)
        self.output_signature = tuple(map(signature_of, outputs, repeats))
        self.output_placements = tuple(map(placement_of, leaves))
        return outputs

    def _refuse_unused(
        self, activations: Sequence[Tensor], gradients: Mapping[int, Tensor | None]
    ) -> None:
        """Raise StageCaptureError if an activation that requires a gradient gets none."""
        problems = [
            f"no gradient reaches activations[{i}], which requires one. The stage before would get "
            "zeros, and parameters behind it would move where eager execution leaves their "
            f"gradient None; return it detached from stage {self._stage_index - 1}, or use it"
            for i, each in enumerate(activations)
            if each.requires_grad and gradients[id(each)] is None
        ]
        if problems:
            raise StageCaptureError(
                what=f"stage {self._stage_index} cannot be captured", problems=problems
            )

    def _result_problems(self, leaves: list[Any]) -> list[str]:
        problems: list[str] = []
        if self._loss_fn is not None and (not leaves or leaves[0].dim() != 0):
            found = f"of shape {list(leaves[0].shape)}" if leaves else "missing"
            problems.append(f"the loss is {found}; reduce it to one number of shape ()")
        return problems or ([] if leaves else ["it returns nothing"])


def _structure_problems(result: Any) -> list[str]:
    """Return a problem for each part of a result that is no tuple or list of tensors."""
    if isinstance(result, tuple | list):
        return [problem for each in result for problem in _structure_problems(each)]
    if isinstance(result, Tensor):
        return []
    return [f"it returns a {type(result).__name__}; return tensors, alone or in tuples"]


def _layout_problems(
    stage_index: int,
    num_stages: int,
    activations: Sequence[Tensor | ActivationSignature],
    loss_fn: StageLoss | None,
) -> list[str]:
    problems: list[str] = []
    if not 0 <= stage_index < num_stages:
        problems.append(f"stage_index is {stage_index}; allowed: 0 to {num_stages - 1}")
    if stage_index == 0 and activations:
        problems.append(
            f"it is the first stage and was given {len(activations)} activations; give "
            "inputs=MicrobatchInputs(args=...)"
        )
    if stage_index > 0 and not activations:
        problems.append("no activations were given; the stage before it sends some")
    if loss_fn is not None and stage_index != num_stages - 1:
        problems.append(f"it has a loss and is not the last of {num_stages} stages")
    return problems


def _differentiable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in module.named_parameters() if each.requires_grad}


def _accepted_kwargs(module: nn.Module) -> tuple[dict[str, Any], bool]:
    """The defaults of what the forward can be given by name, and whether it takes any name."""
    parameters = inspect.signature(module.forward).parameters
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return (
        {name: each.default for name, each in parameters.items() if each.kind in named},
        any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()),
    )


def input_slot(given: GraphInput) -> Slot:
    """The slot of one placeholder of a stage's joint graph."""
    kind: SlotKind = "argument"
    if given.kind == "parameter" or given.kind == "buffer":
        kind = given.kind
    elif given.name.startswith("output_gradients["):
        kind = "output_gradient"
    return Slot(kind=kind, name=given.name, leaf=given.leaf)


def _result_slots(traced: TracedStep, stage: _Stage) -> list[Slot | None]:
    slots: list[Slot | None] = [
        Slot(kind="output", name=f"outputs[{i}]") for i in range(len(stage.output_signature))
    ]
    slots += [
        Slot(kind="input_gradient", name=f"input_gradients[{i}]")
        for i in range(stage.num_input_gradients)
    ]
    for name, layout in _parameter_layouts(traced, stage):
        if layout is None:
            slots.append(None)
            continue
        slots += [Slot(kind="gradient", name=name, leaf=leaf) for leaf in range(layout.num_leaves)]
    return slots


def _gradient_layouts(traced: TracedStep, stage: _Stage) -> dict[str, TensorLayout]:
    return {n: layout for n, layout in _parameter_layouts(traced, stage) if layout is not None}


def _parameter_layouts(traced: TracedStep, stage: _Stage) -> list[tuple[str, TensorLayout | None]]:
    num_leading = len(stage.output_signature) + stage.num_input_gradients
    layouts = traced.output_layouts[num_leading:]
    return list(zip(stage.parameter_names, layouts, strict=True))
