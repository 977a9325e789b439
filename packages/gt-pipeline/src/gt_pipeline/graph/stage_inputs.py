"""What a stage's graphs run on: its live parameters and buffers, and checked microbatches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gt_pipeline.errors import StageInputError
from gt_pipeline.graph._torch_internals import pytree
from gt_pipeline.graph.slots import Slot
from gt_pipeline.graph.stage_capture import StageCapture
from gt_pipeline.runner.stage_protocol import MicrobatchInputs, Tensors
from gt_trace import ArgumentSignature, flatten_tensor
from gt_trace.bound_inputs import BoundInputs

__all__ = ["MicrobatchReader", "StageState"]


class StageState:
    """The parameters and buffers of a stage's module, as plain tensors.

    Args:
        capture: of the module, or of one of the same structure and layouts.
        module: whose state is read.

    Raises:
        gt_trace.StateMismatchError: they differ.
    """

    def __init__(self, capture: StageCapture, module: nn.Module) -> None:
        self._inputs = BoundInputs(capture.traced, module)
        self._slots = capture.inputs[: capture.traced.num_static_inputs]

    def sample(self) -> dict[Slot, Tensor]:
        """By slot, as it is now; a parameter that was replaced is read anew."""
        return dict(zip(self._slots, self._inputs.static_tensors(), strict=True))


class MicrobatchReader:
    """Flattens microbatches to the plain tensors of a captured stage's arguments."""

    def __init__(self, capture: StageCapture) -> None:
        self._stage_index = capture.stage_index
        self._takes_args = capture.stage_index == 0
        self._kwarg_names = capture.kwarg_names
        self._takes_target = capture.has_target
        self._takes_inputs = self._takes_args or bool(self._kwarg_names) or self._takes_target
        self._num_activations = len(capture.input_signature)
        self._activations = [
            (each.shape, each.dtype, f"activations[{i}]")
            for i, each in enumerate(capture.input_signature)
        ]
        arguments = [
            each
            for each in capture.traced.arguments
            if not each.name.startswith("output_gradients[")
        ]
        leaves = arguments[self._num_activations :]
        # A target that is not asked for was captured as None, the last leaf.
        self._leaves = leaves if self._takes_target else leaves[:-1]
        self._all_plain_tensors = all(
            each.is_tensor and each.layout is not None and each.layout.subclass is None
            for each in self._leaves
        )

    def read(self, activations: Tensors, inputs: MicrobatchInputs) -> list[Tensor]:
        """The plain tensors of one microbatch, in the order of the graph's arguments.

        Raises:
            StageInputError: it is not as the captured one; every difference is listed.
        """
        flat: list[Any] = list(activations)
        fits = len(flat) == self._num_activations and all(
            tensor.shape == shape and tensor.dtype == dtype
            for tensor, (shape, dtype, _) in zip(flat, self._activations, strict=True)
        )
        if not fits:
            self._refuse(self._activation_problems(activations))
        if self._takes_inputs:
            flat += self._read_others(inputs)
        return flat

    def _read_others(self, inputs: MicrobatchInputs) -> list[Any]:
        missing = [name for name in self._kwarg_names if name not in inputs.kwargs]
        if missing:
            self._refuse([f"kwargs[{name!r}] is missing" for name in missing])
        kwargs = {name: inputs.kwargs[name] for name in self._kwarg_names}
        args = inputs.args if self._takes_args else ()
        target = (inputs.target,) if self._takes_target else ()
        leaves: list[Any] = pytree.tree_leaves((args, kwargs, target))
        fits = len(leaves) == len(self._leaves) and all(
            _fits(leaf, signature) for leaf, signature in zip(leaves, self._leaves, strict=True)
        )
        if not fits:
            self._refuse(self._other_problems(leaves))
        if self._all_plain_tensors:
            return leaves
        return [
            plain
            for leaf in leaves
            if isinstance(leaf, Tensor)
            for plain in flatten_tensor(leaf)[0]
        ]

    def _activation_problems(self, activations: Tensors) -> list[str]:
        if len(activations) != self._num_activations:
            return [f"{len(activations)} activations, captured with {self._num_activations}"]
        return [
            f"{name}: {_describe(tensor)}, captured as {dtype} {list(shape)}"
            for tensor, (shape, dtype, name) in zip(activations, self._activations, strict=True)
            if tensor.shape != shape or tensor.dtype != dtype
        ]

    def _other_problems(self, leaves: list[Any]) -> list[str]:
        if len(leaves) != len(self._leaves):
            names = ", ".join(each.name for each in self._leaves)
            return [f"{len(leaves)} arguments, captured with {len(self._leaves)}: {names}"]
        return [
            f"{signature.name}: {_describe(leaf)}, captured as {signature.describe()}"
            for leaf, signature in zip(leaves, self._leaves, strict=True)
            if not _fits(leaf, signature)
        ]

    def _refuse(self, problems: list[str]) -> None:
        raise StageInputError(
            what=f"this microbatch is not as the one that stage {self._stage_index} was captured "
            "with",
            problems=problems,
        )


def _fits(leaf: Any, signature: ArgumentSignature) -> bool:
    if not signature.is_tensor:
        return type(leaf) is type(signature.constant) and leaf == signature.constant
    return (
        isinstance(leaf, torch.Tensor)
        and leaf.shape == signature.shape
        and leaf.dtype == signature.dtype
    )


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype} {list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
