"""The plain tensors that a call of a captured graph runs on: live state, and checked arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gt_trace._torch_internals import FakeTensorMode, pytree
from gt_trace.capture.argument_structure import structure_differences
from gt_trace.capture.captured_mode import CapturedMode
from gt_trace.capture.graph_inputs import ArgumentSignature, GraphInput
from gt_trace.capture.module_state import StateEntry, StateSlot, collect_state
from gt_trace.capture.subclass_layout import TensorLayout, flatten_tensor
from gt_trace.errors import InputMismatchError, StateMismatchError


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedInputs:
    """What a capture says of its inputs."""

    inputs: tuple[GraphInput, ...]
    """What each placeholder of the graph stands for, in order."""

    state: tuple[StateEntry, ...]
    """Parameters, buffers and optimizer state, in the order of their plain tensors."""

    state_layouts: tuple[TensorLayout, ...]
    """How each entry of ``state`` is made of plain tensors."""

    arguments: tuple[ArgumentSignature, ...]
    """What a call must pass: one signature for each leaf of the argument tree."""

    argument_spec: pytree.TreeSpec
    example_inputs: tuple[Any, ...]
    """The fake plain tensors of state and arguments with which the graph was traced."""

    fake_mode: FakeTensorMode
    mode: CapturedMode
    """The modes in which the step was captured; it runs in no others."""


class BoundInputs:
    """Turns calls into plain tensors: those of the state first, then those of the arguments.

    The state is sampled once, and again only when an object of it was replaced (a parameter
    re-registered, a checkpoint loaded by assignment, a submodule exchanged), which every call
    checks by identity.

    Args:
        captured: what was captured.
        module: the captured module, or one of the same structure and layouts.
        optimizer: given if one was captured.

    Raises:
        StateMismatchError: names, shapes, dtypes or placements differ from the captured ones.
    """

    def __init__(
        self,
        captured: CapturedInputs,
        module: nn.Module | None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._captured = captured
        self._module = module
        self._optimizer = optimizer
        self._num_static = sum(layout.num_leaves for layout in captured.state_layouts)
        self._static: list[torch.Tensor] = []
        self._slots: list[StateSlot] = []
        self._inner: list[tuple[torch.Tensor, str, torch.Tensor]] = []
        self._accepted: set[tuple[object, ...]] = set()
        self._submodules: list[tuple[Mapping[str, nn.Module | None], tuple[nn.Module | None, ...]]]
        self.version = 0
        """A number that grows each time that the state is sampled."""

        self._sample()

    def plain_tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors of one call, in the order of state and arguments.

        Raises:
            InputMismatchError: the arguments differ from the captured ones in structure, shape,
                dtype, layout or constant value.
            StateMismatchError: the state was replaced by one that does not fit.
        """
        flat = self._flatten_arguments(args, kwargs)
        return [*self.static_tensors(), *flat]

    def static_tensors(self) -> list[torch.Tensor]:
        """The plain tensors of the state alone, as it is now.

        Raises:
            StateMismatchError: the state was replaced by one that does not fit.
        """
        if not self._state_is_current():
            self._sample()
        return self._static

    @property
    def state(self) -> list[torch.Tensor]:
        """The live tensors themselves, one for each entry, as of the last call."""
        return [slot.tensor for slot in self._slots]

    def _state_is_current(self) -> bool:
        return (
            all(slot.holds(slot.tensor) for slot in self._slots)
            and all(getattr(outer, name) is leaf for outer, name, leaf in self._inner)
            and all(tuple(held.values()) == known for held, known in self._submodules)
        )

    def _sample(self) -> None:
        slots = collect_state(self._module, self._optimizer)
        expected = self._captured.state
        names = [slot.entry for slot in slots]
        if names != list(expected):
            raise StateMismatchError(_explain_names(expected, names))
        static: list[torch.Tensor] = []
        inner: list[tuple[torch.Tensor, str, torch.Tensor]] = []
        problems: list[str] = []
        examples = iter(self._captured.example_inputs)
        for slot, layout in zip(slots, self._captured.state_layouts, strict=True):
            leaves, found = flatten_tensor(slot.tensor)
            example_leaves = [next(examples) for _ in range(layout.num_leaves)]
            if found != layout:
                problems.append(
                    f"{slot.entry.name}: {found.describe()}, captured as {layout.describe()}"
                )
                continue
            for leaf, example in zip(leaves, example_leaves, strict=True):
                if leaf.shape != example.shape or leaf.dtype != example.dtype:
                    problems.append(
                        f"{slot.entry.name}: {leaf.dtype} {list(leaf.shape)}, captured as "
                        f"{example.dtype} {list(example.shape)}"
                    )
            # The tensors themselves, no detached views: `parameter.data = ...` must be seen.
            static.extend(leaves)
            inner.extend(_inner_places(slot.tensor, found))
        if problems:
            raise StateMismatchError(
                "the module's state is not the one that was captured:\n  " + "\n  ".join(problems)
            )
        self._slots, self._static, self._inner = slots, static, inner
        self._submodules = [
            (each._modules, tuple(each._modules.values()))
            for each in (() if self._module is None else self._module.modules())
            if each._modules
        ]
        self.version += 1

    def _flatten_arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        if spec != self._captured.argument_spec:
            differences = structure_differences(
                self._captured.argument_spec, self._captured.arguments, spec, leaves
            )
            raise InputMismatchError(
                "the arguments have another structure than the captured ones:\n  "
                + "\n  ".join(differences)
            )
        flat: list[torch.Tensor] = []
        problems: list[str] = []
        dynamic: list[object] = []
        for leaf, signature in zip(leaves, self._captured.arguments, strict=True):
            if not signature.is_tensor:
                if type(leaf) is not type(signature.constant) or leaf != signature.constant:
                    problems.append(
                        f"{signature.name}: {leaf!r}, captured with the constant "
                        f"{signature.constant!r}; pass a tensor if it must vary"
                    )
                continue
            if not isinstance(leaf, torch.Tensor):
                problems.append(f"{signature.name}: {leaf!r}, captured as {signature.describe()}")
                continue
            fits = leaf.dtype == signature.dtype and len(leaf.shape) == len(signature.shape)
            fits = fits and all(
                want is None or want == size
                for want, size in zip(signature.shape, leaf.shape, strict=True)
            )
            if not fits:
                problems.append(
                    f"{signature.name}: {leaf.dtype} {list(leaf.shape)}, captured as "
                    f"{signature.describe()}"
                )
                continue
            leaf_tensors, layout = flatten_tensor(leaf)
            if signature.layout is not None and not _same_kind(layout, signature.layout):
                problems.append(
                    f"{signature.name}: {layout.describe()}, captured as "
                    f"{signature.layout.describe()}"
                )
                continue
            flat.extend(leaf_tensors)
            if None in signature.shape:
                dynamic.append(tuple(leaf.shape))
        if problems:
            raise InputMismatchError(
                "the inputs are not those of the captured step:\n  " + "\n  ".join(problems)
            )
        if dynamic:
            self._check_guards(tuple(dynamic), flat)
        return flat

    def _check_guards(self, key: tuple[object, ...], flat: list[torch.Tensor]) -> None:
        """Dynamic sizes must satisfy what the trace assumed of them; each set is judged once."""
        if key in self._accepted:
            return
        shape_env = self._captured.fake_mode.shape_env
        examples = self._captured.example_inputs[self._num_static :]
        if shape_env is None or not shape_env.evaluate_guards_for_args(list(examples), flat):
            raise InputMismatchError(
                f"the dynamic input shapes {list(key)} break an assumption of the capture; its "
                f"guards are {shape_env.format_guards() if shape_env is not None else 'unknown'}"
            )
        self._accepted.add(key)


def _same_kind(found: TensorLayout, captured: TensorLayout) -> bool:
    """Equal up to outer sizes, which the shape check judges."""
    return found.subclass is captured.subclass and (
        found.subclass is None or found.context == captured.context
    )


def _inner_places(
    tensor: torch.Tensor, layout: TensorLayout
) -> list[tuple[torch.Tensor, str, torch.Tensor]]:
    places: list[tuple[torch.Tensor, str, torch.Tensor]] = []
    for name, inner_layout in layout.attributes:
        inner = getattr(tensor, name)
        places.append((tensor, name, inner))
        places.extend(_inner_places(inner, inner_layout))
    return places


def _explain_names(expected: Sequence[StateEntry], found: Sequence[StateEntry]) -> str:
    want = {name for entry in expected for name in entry.names}
    have = {name for entry in found for name in entry.names}
    lines = ["the module's parameters, buffers or optimizer state are not those captured"]
    if want - have:
        lines.append(f"  missing: {sorted(want - have)}")
    if have - want:
        lines.append(f"  not captured: {sorted(have - want)}")
    if want == have:
        lines.append("  the names agree, but their order or tying differs")
    return "\n".join(lines)
