"""What a stage's graphs run on: its live parameters and buffers, and checked microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gt_pipeline.errors import StageInputError
from gt_pipeline.graph._torch_internals import pytree
from gt_pipeline.graph.slots import Slot
from gt_pipeline.graph.stage_capture import LOST_HOOKS, StageCapture
from gt_pipeline.runner.stage_protocol import MicrobatchInputs, Tensors
from gt_trace import ArgumentSignature, TensorLayout, flatten_tensor
from gt_trace.capture.argument_structure import structure_differences
from gt_trace.capture.bound_inputs import BoundInputs
from gt_trace.capture.captured_mode import ModeGuard
from gt_trace.capture.given_layout import laid_out
from gt_trace.capture.graph_inputs import same_constant
from gt_trace.capture.input_uses import InputUse

_NOTHING = object()


class StageState:
    """The parameters and buffers of a stage's module, as plain tensors.

    The capture is of the module, or of one of the same structure and layouts.

    Raises:
        gt_trace.StateMismatchError: they differ.
    """

    def __init__(self, capture: StageCapture, module: nn.Module) -> None:
        self._inputs = BoundInputs(capture.traced, module)
        self._guard = ModeGuard(capture.traced.mode, module, lost_hooks=LOST_HOOKS)
        self._slots = capture.inputs[: capture.traced.num_static_inputs]

    def sample(self, tensors: Sequence[Tensor] | None = None) -> dict[Slot, Tensor]:
        """The state as it is now; a parameter that was replaced is read anew.

        Args:
            tensors: to be read in place of the module's, in the same order.
        """
        if tensors is None:
            tensors = self._inputs.static_tensors()
        return dict(zip(self._slots, tensors, strict=True))

    def check_mode(self) -> None:
        """Make sure that a training step would run as it was captured.

        Raises:
            gt_trace.StateMismatchError: modes (training or evaluation, autocast), hooks, or which
                parameters require a gradient, differ; every difference is listed.
        """
        self._guard.check(self._inputs.version)


class MicrobatchReader:
    """Flattens microbatches to the plain tensors of a captured stage's arguments."""

    def __init__(self, capture: StageCapture) -> None:
        self._stage_index = capture.stage_index
        self._takes_args = capture.stage_index == 0
        self._kwarg_names = capture.kwarg_names
        self._left_out = capture.left_out
        self._takes_any_kwargs = capture.takes_any_kwargs
        self._takes_target = capture.has_target
        self._takes_inputs = self._takes_args or bool(self._kwarg_names) or self._takes_target
        self._captured = capture.traced
        self._num_activations = len(capture.input_signature)
        self._activations = [
            (each.shape, each.dtype, f"activations[{i}]")
            for i, each in enumerate(capture.input_signature)
        ]
        given = capture.traced.arguments
        arguments = [each for each in given if not each.name.startswith("output_gradients[")]
        self._num_gradients = len(given) - len(arguments)
        leaves = arguments[self._num_activations :]
        # A target that is not asked for was captured as None, the last leaf.
        self._leaves = leaves if self._takes_target else leaves[:-1]
        traced = capture.traced
        self._examples: dict[str, list[tuple[Tensor, tuple[InputUse, ...]]]] = {}
        """The captured plain tensors of each argument, and how the graph uses them."""

        for each, example in zip(traced.inputs, traced.example_inputs, strict=True):
            if each.kind == "argument":
                self._examples.setdefault(each.name, []).append((example, each.uses))
        _, args, kwargs, target, _ = traced.argument_spec.child(0).children()
        specs = [args, kwargs, target] if self._takes_target else [args, kwargs]
        self._flatten = [_flattening(spec) for spec in specs]

    def check_activations(self, activations: Tensors) -> None:
        """Make sure that what the stage before sent is as it was captured.

        Raises:
            StageInputError: it is not; every difference is listed.
        """
        if problems := self._activation_problems(activations):
            self._refuse_any(problems)

    def read(self, inputs: MicrobatchInputs) -> list[Tensor]:
        """The plain tensors of one microbatch, as the graph takes them behind activations.

        Raises:
            StageInputError: it is not as the captured one; every difference is listed.
        """
        self._refuse_any(self._left_out_problems(inputs.kwargs))
        return self._read(inputs) if self._takes_inputs else []

    def _left_out_problems(self, kwargs: Mapping[str, Any]) -> list[str]:
        """What the module would take and the graph does not; other stages may take it."""
        return [
            f"kwargs[{name!r}] was not given when it was captured, and the graph would ignore it"
            for name, value in kwargs.items()
            if name not in self._kwarg_names
            and (self._takes_any_kwargs or name in self._left_out)
            and not _is_default(value, self._left_out.get(name, _NOTHING))
        ]

    def _read(self, inputs: MicrobatchInputs) -> list[Any]:
        missing = [name for name in self._kwarg_names if name not in inputs.kwargs]
        self._refuse_any([f"kwargs[{name!r}] is missing" for name in missing])
        kwargs = {name: inputs.kwargs[name] for name in self._kwarg_names}
        args = inputs.args if self._takes_args else ()
        target = inputs.target if self._takes_target else None
        leaves: list[Any] = []
        try:
            # By the captured keys: a dictionary may have been filled in another order.
            for flatten, tree in zip(self._flatten, (args, kwargs, target), strict=False):
                leaves += flatten(tree)
        except ValueError as error:
            self._refuse_any(self._structure_problems(args, kwargs, target) or [str(error)])
        self._refuse_any(
            f"{signature.name}: {_describe(leaf)}, {_describe_captured(leaf, signature)}"
            for leaf, signature in zip(leaves, self._leaves, strict=True)
            if not _fits(leaf, signature)
        )
        return self._laid_out(leaves)

    def _laid_out(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Return plain tensors with the captured strides; refuse those that cannot have them."""
        plain: list[Tensor] = []
        problems: list[str] = []
        for leaf, signature in zip(leaves, self._leaves, strict=True):
            if not isinstance(leaf, Tensor):
                continue
            captured = self._examples[signature.name]
            for tensor, (example, uses) in zip(flatten_tensor(leaf)[0], captured, strict=True):
                given = laid_out(tensor, example, example.stride(), uses)
                if isinstance(given, str):
                    problems.append(f"{signature.name}: {given}")
                else:
                    plain.append(given)
        self._refuse_any(problems)
        return plain

    def _activation_problems(self, activations: Tensors) -> list[str]:
        if len(activations) != self._num_activations:
            return [f"{len(activations)} activations, captured with {self._num_activations}"]
        return [
            f"{name}: {_describe(tensor)}, captured as {dtype} {list(shape)}"
            for tensor, (shape, dtype, name) in zip(activations, self._activations, strict=True)
            if tensor.shape != shape or tensor.dtype != dtype
        ]

    def _structure_problems(self, args: Any, kwargs: Any, target: Any) -> list[str]:
        # Activations and gradients arrive on another way, and are checked there.
        activations = tuple(
            torch.empty(shape, dtype=dtype, device="meta") for shape, dtype, _ in self._activations
        )
        gradients = (None,) * self._num_gradients
        leaves, spec = pytree.tree_flatten(((activations, args, kwargs, target, gradients), {}))
        captured = self._captured
        return structure_differences(captured.argument_spec, captured.arguments, spec, leaves)

    def _refuse_any(self, problems: Iterable[str]) -> None:
        if found := list(problems):
            raise StageInputError(
                what=f"this microbatch is not as the one that stage {self._stage_index} was "
                "captured with",
                problems=found,
            )


def _flattening(spec: pytree.TreeSpec) -> Callable[[Any], list[Any]]:
    """``spec.flatten_up_to``, without its way to find out how each type is taken apart.

    For tuples and dictionaries, of which nearly all arguments are made.
    """
    if spec.is_leaf():
        return lambda tree: [tree]
    if spec.type not in (tuple, dict):
        return spec.flatten_up_to
    of_children = [_flattening(child) for child in spec.children()]
    keys = range(len(of_children)) if spec.type is tuple else spec.context

    def flatten(tree: Any) -> list[Any]:
        if type(tree) is not spec.type or len(tree) != len(of_children):
            return spec.flatten_up_to(tree)  # which says what is wrong
        try:
            children = [tree[key] for key in keys]
        except KeyError:
            return spec.flatten_up_to(tree)
        return [leaf for of, child in zip(of_children, children, strict=True) for leaf in of(child)]

    return flatten


def _is_default(value: Any, default: Any) -> bool:
    if value is default:
        return True
    return isinstance(value, bool | int | float | str) and same_constant(value, default)


def _fits(leaf: Any, signature: ArgumentSignature) -> bool:
    if not signature.is_tensor:
        return same_constant(leaf, signature.constant)
    return (
        isinstance(leaf, torch.Tensor)
        and leaf.shape == signature.shape
        and leaf.dtype == signature.dtype
        and _has_layout(leaf, signature.layout)
    )


def _has_layout(leaf: Tensor, layout: TensorLayout | None) -> bool:
    if type(leaf) in (torch.Tensor, nn.Parameter):
        return layout is None or layout.subclass is None
    return flatten_tensor(leaf)[1] == layout


def _describe_captured(leaf: Any, signature: ArgumentSignature) -> str:
    if isinstance(leaf, int | float) and isinstance(signature.constant, int | float):
        hint = "give a tensor if microbatches differ in it"
        return f"captured with the constant {signature.constant!r}; {hint}"
    return f"captured as {signature.describe()}"


def _describe(leaf: Any) -> str:
    if isinstance(leaf, bool | int | float | complex | str | None):
        return repr(leaf)
    if not isinstance(leaf, Tensor):
        return f"a {type(leaf).__name__}"
    kind = "" if type(leaf) in (torch.Tensor, nn.Parameter) else f"{type(leaf).__name__} "
    return f"{kind}{leaf.dtype} {list(leaf.shape)}"
