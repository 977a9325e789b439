"""The result of a capture: a graph of plain tensors, and how to call it with the live objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import GraphModule

from gt_trace._torch_internals import FakeTensorMode, pytree
from gt_trace.errors import InputMismatchError, StateMismatchError
from gt_trace.module_state import StateEntry, StateSlot, collect_state
from gt_trace.subclass_layout import TensorLayout, flatten_tensor, unflatten_tensor

__all__ = ["BoundStep", "GraphInput", "InputKind", "TracedStep"]

InputKind = Literal["parameter", "buffer", "optimizer_state", "argument"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInput:
    """What one placeholder of the graph stands for."""

    kind: InputKind
    name: str
    """Fully qualified name of the state, or path of the argument as ``kwargs['positions']``."""

    aliases: tuple[str, ...] = ()
    """Further names of a tied parameter."""

    leaf: int = 0
    """Which plain tensor of a tensor subclass; 0 for plain tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentSignature:
    """What a call must pass for one leaf of the argument tree."""

    name: str
    is_tensor: bool
    constant: Any = None
    """The value of a leaf that is no tensor; it is part of the graph."""

    shape: tuple[int | None, ...] = ()
    """None where the dimension is dynamic."""

    dtype: torch.dtype | None = None
    layout: TensorLayout | None = None

    def describe(self) -> str:
        """As it was captured, for error messages."""
        if not self.is_tensor:
            return repr(self.constant)
        dims = ", ".join("any" if size is None else str(size) for size in self.shape)
        return f"{self.dtype} [{dims}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """One captured training step.

    ``graph_module`` is a function of plain tensors: static inputs first (parameters, buffers,
    optimizer state), then arguments. Passes edit it in place. In-place updates of state (buffers,
    or parameters when the optimizer was captured) are operators of the graph.
    """

    graph_module: GraphModule
    inputs: tuple[GraphInput, ...]
    """One for each placeholder, in order."""

    example_inputs: tuple[Any, ...]
    """The fake tensors with which the graph was traced, one for each placeholder."""

    fake_mode: FakeTensorMode
    state: tuple[StateEntry, ...]
    state_layouts: tuple[TensorLayout, ...]
    """Layout of each entry of ``state``."""

    arguments: tuple[ArgumentSignature, ...]
    argument_spec: pytree.TreeSpec
    output_spec: pytree.TreeSpec
    output_layouts: tuple[TensorLayout | None, ...]
    """Layout of each leaf of the output tree; None for a leaf that is no tensor."""

    @property
    def num_static_inputs(self) -> int:
        """Leading placeholders whose tensors keep their addresses from step to step."""
        return sum(layout.num_leaves for layout in self.state_layouts)

    def bind(
        self,
        module: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        executable: Callable[..., Sequence[Any]] | None = None,
    ) -> BoundStep:
        """A callable that runs the step on the state of ``module``.

        Args:
            module: the captured module, or one of the same structure and layouts.
            optimizer: given if one was captured.
            executable: runs instead of ``graph_module``, as a compiled form of it. Takes the
                plain tensors of the placeholders, returns the plain outputs.

        Raises:
            StateMismatchError: names, shapes, dtypes or placements differ from the captured ones.
        """
        return BoundStep(self, module, optimizer, executable or self.graph_module)


class BoundStep:
    """A captured step bound to live state: call it with the step's arguments.

    The state is sampled once, and again only when an object of it was replaced (a parameter
    re-registered, a checkpoint loaded by assignment), which every call checks by identity.
    """

    def __init__(
        self,
        step: TracedStep,
        module: nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        executable: Callable[..., Sequence[Any]],
    ) -> None:
        self.step = step
        self._module = module
        self._optimizer = optimizer
        self._executable = executable
        self._static: list[torch.Tensor] = []
        self._slots: list[StateSlot] = []
        self._inner: list[tuple[torch.Tensor, str, torch.Tensor]] = []
        self._accepted: set[tuple[object, ...]] = set()
        self._sample()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step.

        Raises:
            InputMismatchError: the arguments differ from the captured ones in structure, shape,
                dtype, layout or constant value.
            StateMismatchError: the state was replaced by one that does not fit.
        """
        flat = self._flatten_arguments(args, kwargs)
        if not self._state_is_current():
            self._sample()
        # The graph holds its own backward: an autograd graph on top would only keep memory.
        with torch.no_grad():
            outputs = self._executable(*self._static, *flat)
        return self._wrap(outputs)

    def _wrap(self, outputs: Sequence[Any]) -> Any:
        leaves: list[Any] = []
        start = 0
        for layout in self.step.output_layouts:
            if layout is None or layout.subclass is None:
                leaves.append(outputs[start])
                start += 1
                continue
            leaves.append(unflatten_tensor(outputs[start : start + layout.num_leaves], layout))
            start += layout.num_leaves
        return pytree.tree_unflatten(leaves, self.step.output_spec)

    def _state_is_current(self) -> bool:
        return all(slot.holds(slot.tensor) for slot in self._slots) and all(
            getattr(outer, name) is leaf for outer, name, leaf in self._inner
        )

    def _sample(self) -> None:
        slots = collect_state(self._module, self._optimizer)
        expected = self.step.state
        names = [slot.entry for slot in slots]
        if names != list(expected):
            raise StateMismatchError(_explain_names(expected, names))
        static: list[torch.Tensor] = []
        inner: list[tuple[torch.Tensor, str, torch.Tensor]] = []
        problems: list[str] = []
        examples = iter(self.step.example_inputs)
        for slot, layout in zip(slots, self.step.state_layouts, strict=True):
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

    def _flatten_arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        if spec != self.step.argument_spec:
            raise InputMismatchError(
                "the arguments have another structure than the captured ones\n"
                f"  captured: {self.step.argument_spec}\n  now:      {spec}"
            )
        flat: list[torch.Tensor] = []
        problems: list[str] = []
        dynamic: list[object] = []
        for leaf, signature in zip(leaves, self.step.arguments, strict=True):
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
        shape_env = self.step.fake_mode.shape_env
        examples = self.step.example_inputs[self.step.num_static_inputs :]
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
