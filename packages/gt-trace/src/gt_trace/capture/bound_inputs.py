"""The plain tensors that a call of a captured graph runs on: live state, and checked arguments."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from gt_trace._torch_internals import FakeTensorMode, pytree, storage_key
from gt_trace.capture.captured_mode import CapturedMode
from gt_trace.capture.given_arguments import ArgumentReader
from gt_trace.capture.given_layout import state_problem
from gt_trace.capture.graph_inputs import ArgumentSignature, GraphInput
from gt_trace.capture.module_state import (
    StateEntry,
    StateSlot,
    collect_state,
    parameter_names,
    state_names,
)
from gt_trace.capture.optimizer_state import (
    BoundOptimizer,
    CapturedGroup,
    captured_groups,
    group_problems,
)
from gt_trace.capture.shared_inputs import NamedInput, history_problems, memory_problems
from gt_trace.capture.subclass_layout import TensorLayout, flatten_tensor
from gt_trace.errors import InputMismatchError, StateMismatchError


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedInputs:
    """What a capture says of its inputs."""

    is_differentiable: ClassVar[bool] = False
    """Whether autograd follows calls, so that an argument may require a gradient or not."""

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

    groups: tuple[CapturedGroup, ...] = ()
    """Parameter groups of the optimizer that was captured."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what ``copy`` needs.

        Raises:
            TypeError: it is pickled.
        """
        if sys._getframe(1).f_code.co_filename != copy.__file__:
            raise TypeError(
                "a capture holds tensors without data, which cannot be pickled; store it by "
                "gt_trace.artifacts.save_step.save, or capture again where it is needed"
            )
        return object.__reduce_ex__(self, protocol)


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
        self._names = leaf_names(captured)
        uses = {(each.name, each.leaf): each.uses for each in captured.inputs}
        self._uses = [uses.get(name, ()) for name in self._names]
        examples = list(zip(captured.example_inputs, self._uses, strict=True))
        self._reader = ArgumentReader(
            captured.arguments,
            captured.argument_spec,
            captured=examples[self._num_static :],
            shape_env=captured.fake_mode.shape_env,
            may_require_grad=captured.is_differentiable,
        )
        self._writes = any("written" in each for each in self._uses)
        self._writes_arguments = any("written" in each for each in self._uses[self._num_static :])
        self._differentiates_arguments = not captured.is_differentiable and any(
            each.requires_grad for each in captured.arguments
        )
        self._static: list[torch.Tensor] = []
        self._storages: set[int] = set()
        self._forms: list[tuple[torch.Tensor, torch.Size, tuple[int, ...], torch.dtype]] = []
        self._slots: list[StateSlot] = []
        self._state_names: dict[int, str] = {}
        self._places: list[tuple[Mapping[Any, Any], Any, torch.Tensor]] = []
        self._inner: list[tuple[torch.Tensor, str, torch.Tensor]] = []
        self._bound_optimizer: BoundOptimizer | None = None
        self._submodules: list[tuple[Mapping[str, nn.Module | None], tuple[nn.Module | None, ...]]]
        self.version = 0
        """A number that grows each time that the state is sampled."""

        self._sample()

    def plain_tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors of one call, in the order of state and arguments.

        Raises:
            InputMismatchError: the arguments differ from the captured ones in structure, shape,
                dtype, device, layout, constant value, or in whether they require a gradient; or
                have strides that they cannot be copied from; or depend on one another.
            StateMismatchError: the state was replaced by one that does not fit.
        """
        static = self.static_tensors()
        flat = self._reader.plain_tensors(args, kwargs, state=self._state_names)
        if self._writes or self._differentiates_arguments:
            self._refuse_dependent(flat, (args, kwargs))
        return [*static, *flat]

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
        if self._bound_optimizer is not None and not self._bound_optimizer.is_current():
            return False
        # Plain loops: every call of a step looks at every parameter.
        for holder, key, tensor in self._places:
            if holder.get(key) is not tensor:
                return False
        for each, shape, stride, dtype in self._forms:
            # `parameter.data = ...` leaves the object, and may change all of these.
            if each.stride() != stride or each.shape != shape or each.dtype is not dtype:
                return False
        return all(getattr(outer, name) is leaf for outer, name, leaf in self._inner) and all(
            tuple(held.values()) == known for held, known in self._submodules
        )

    def _sample(self) -> None:
        slots = collect_state(self._module, self._optimizer)
        expected = self._captured.state
        groups = captured_groups(self._optimizer, parameter_names(slots))
        if problems := group_problems(self._captured.groups, groups):
            raise StateMismatchError(
                "this is not as it was when it was captured:\n  " + "\n  ".join(problems)
            )
        names = [slot.entry for slot in slots]
        if names != list(expected):
            raise StateMismatchError(_explain_names(expected, names))
        static: list[torch.Tensor] = []
        inner: list[tuple[torch.Tensor, str, torch.Tensor]] = []
        problems = []
        captured = zip(self._captured.example_inputs, self._uses, strict=True)
        for slot, layout in zip(slots, self._captured.state_layouts, strict=True):
            leaves, found = flatten_tensor(slot.tensor)
            expected_leaves = [next(captured) for _ in range(layout.num_leaves)]
            if found != layout:
                problems.append(
                    f"{slot.entry.name}: {found.describe()}, captured as {layout.describe()}"
                )
                continue
            for leaf, (example, uses) in zip(leaves, expected_leaves, strict=True):
                if problem := state_problem(leaf, example, uses):
                    problems.append(f"{slot.entry.name}: {problem}")
            # The tensors themselves, no detached views: `parameter.data = ...` must be seen.
            static.extend(leaves)
            inner.extend(_inner_places(slot.tensor, found))
        if not problems and self._writes:
            problems = memory_problems(self._named(static, start=0))
        if problems:
            raise StateMismatchError(
                "the module's state is not the one that was captured:\n  " + "\n  ".join(problems)
            )
        self._slots, self._static, self._inner = slots, static, inner
        self._state_names = state_names(slots)
        self._bound_optimizer = BoundOptimizer(self._optimizer) if self._optimizer else None
        self._places = [(*place, slot.tensor) for slot in slots for place in slot.places]
        self._forms = [(each, each.shape, each.stride(), each.dtype) for each in static]
        self._storages = set(map(storage_key, static))
        self._submodules = [
            (each._modules, tuple(each._modules.values()))
            for each in (() if self._module is None else self._module.modules())
            if each._modules
        ]
        self.version += 1

    def _refuse_dependent(self, flat: Sequence[torch.Tensor], tree: Any) -> None:
        """Refuse arguments in the memory of other inputs, or with a history that leads to them.

        Raises:
            InputMismatchError: lists each.
        """
        problems: list[str] = []
        shared = self._writes and any(storage_key(each) in self._storages for each in flat)
        if shared or self._writes_arguments:
            named = self._named(flat, start=self._num_static)
            state = self._named(self._static, start=0) if shared else []
            problems += memory_problems([*state, *named])
        if self._differentiates_arguments:
            leaves = zip(self._captured.arguments, pytree.tree_leaves(tree), strict=True)
            names = [entry.name for entry in self._captured.state]
            problems += history_problems(
                [(each.name, leaf) for each, leaf in leaves if each.requires_grad],
                list(zip(names, self.state, strict=True)),
            )
        if problems:
            raise InputMismatchError(
                "the inputs of a captured step must be independent:\n  " + "\n  ".join(problems)
            )

    def _named(self, tensors: Sequence[torch.Tensor], *, start: int) -> list[NamedInput]:
        names = self._names[start : start + len(tensors)]
        uses = self._uses[start : start + len(tensors)]
        return [
            NamedInput(name=name, tensor=tensor, is_written="written" in each)
            for (name, _), tensor, each in zip(names, tensors, uses, strict=True)
        ]


def leaf_names(captured: CapturedInputs) -> list[tuple[str, int]]:
    """Name and position of each plain tensor, of the state and then of the arguments."""
    state = zip(captured.state, captured.state_layouts, strict=True)
    layouts = [(entry.name, layout) for entry, layout in state]
    layouts += [(each.name, each.layout) for each in captured.arguments if each.layout is not None]
    return [(name, leaf) for name, layout in layouts for leaf in range(layout.num_leaves)]


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
        lines += [f"  one tensor: {list(e.names)}" for e in expected if e not in set(found)]
    return "\n".join(lines)
