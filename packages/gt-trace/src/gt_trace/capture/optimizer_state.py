"""The optimizer that a step steps: its tensors are state, its numbers are constants.

Tensors of its state and of its parameter groups (a learning rate) are inputs of the graph.
Numbers in parameter groups are part of the graph: they are recorded, and compared at each call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gt_trace.capture.graph_inputs import GraphInput
from gt_trace.errors import CaptureError

_NO_HYPERPARAMETERS = frozenset(
    {"params", "param_names", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
    | {"swa_lr"}
)
"""Keys of groups that no step reads: all but two are of learning rate schedulers."""

_SETS = frozenset({"aten::fill_", "aten::copy_", "aten::zero_"})


class _NoConstant:
    """A hyperparameter that is a tensor, or that a group lacks."""

    def __repr__(self) -> str:
        return "a tensor or nothing"


_NO_CONSTANT = _NoConstant()

Place = tuple[MutableMapping[Any, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedGroup:
    """A parameter group as it was captured."""

    parameters: tuple[str, ...]
    """Names of its parameters, in order."""

    constants: Mapping[str, Any]
    """Hyperparameters that are no tensors, by key."""


class _Items(MutableMapping[int, Any]):
    """The items of a tuple or list of a parameter group, as of ``betas``."""

    def __init__(self, group: MutableMapping[str, Any], key: str) -> None:
        self._group = group
        self._key = key

    def __getitem__(self, index: int) -> Any:
        try:
            return self._group[self._key][index]
        except (IndexError, TypeError):
            raise KeyError(index) from None

    def __setitem__(self, index: int, value: Any) -> None:
        items = self._group[self._key]
        changed = [*items]
        changed[index] = value
        self._group[self._key] = type(items)(changed)

    def __delitem__(self, index: int) -> None:
        raise NotImplementedError

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return len(self._group[self._key])


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[str, torch.Tensor, Place]]:
    """Yield the tensors of the state and of the groups, with name and place; shared ones again.

    Args:
        optimizer: of a module.
        names: of the module's parameters, by their ids.

    Raises:
        CaptureError: the optimizer has parameters of another module.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    foreign = sum(id(each) not in names for each in parameters)
    if foreign:
        raise CaptureError(
            f"{foreign} parameters of the {type(optimizer).__name__} are not parameters of the "
            "module; build the optimizer from the module that is captured"
        )
    for parameter in parameters:
        state: dict[str, Any] = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield f"{names[id(parameter)]}:{key}", value, (state, key)
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            name = f"group {index}:{key}"
            if key in _NO_HYPERPARAMETERS:
                continue
            if isinstance(value, torch.Tensor):
                yield name, value, (group, key)
            elif isinstance(value, tuple | list):
                for position, each in enumerate(value):
                    if isinstance(each, torch.Tensor):
                        yield f"{name}[{position}]", each, (_Items(group, key), position)


def captured_groups(
    optimizer: torch.optim.Optimizer | None, names: Mapping[int, str]
) -> tuple[CapturedGroup, ...]:
    """Return the parameter groups as they are now; none without an optimizer."""
    if optimizer is None:
        return ()
    return tuple(
        CapturedGroup(
            parameters=tuple(names[id(each)] for each in group["params"]),
            constants=_constants(group),
        )
        for group in optimizer.param_groups
    )


class BoundOptimizer:
    """Finds that the objects of an optimizer were replaced, or its numbers changed.

    Args:
        optimizer: live.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = optimizer.param_groups
        self._each = [*optimizer.param_groups]
        self._parameters = [[*group["params"]] for group in optimizer.param_groups]
        self._all_state = optimizer.state
        self._states = [
            (each, optimizer.state.get(each)) for group in self._parameters for each in group
        ]
        self._constants = [
            (group, key, value) for group in self._each for key, value in _constants(group).items()
        ]
        self._sizes = [len(group) for group in self._each]

    def is_current(self) -> bool:
        """Return whether groups, their parameters, numbers and states are still the same."""
        optimizer = self._optimizer
        groups, state = optimizer.param_groups, optimizer.state
        if groups is not self._groups or state is not self._all_state:
            return False
        if len(groups) != len(self._each):
            return False
        for group, known, parameters, size in zip(
            groups, self._each, self._parameters, self._sizes, strict=True
        ):
            if group is not known or len(group) != size:
                return False
            if [*map(id, group["params"])] != [*map(id, parameters)]:
                return False
        for parameter, held in self._states:
            if state.get(parameter) is not held:
                return False
        return all(_is_same(group.get(key), value) for group, key, value in self._constants)


def group_problems(captured: Sequence[CapturedGroup], now: Sequence[CapturedGroup]) -> list[str]:
    """Return a sentence for each difference of parameter groups."""
    if len(captured) != len(now):
        return [f"the optimizer has {len(now)} parameter groups, captured with {len(captured)}"]
    problems: list[str] = []
    for index, (old, new) in enumerate(zip(captured, now, strict=True)):
        if old.parameters != new.parameters:
            problems.append(
                f"group {index} of the optimizer has the parameters {list(new.parameters)}, "
                f"captured with {list(old.parameters)}"
            )
        for key in dict.fromkeys((*old.constants, *new.constants)):
            was = old.constants.get(key, _NO_CONSTANT)
            value = new.constants.get(key, _NO_CONSTANT)
            if not _is_same(value, was):
                remedy = "pass a tensor if it must vary, or capture again"
                if key in ("betas", "momentum"):
                    remedy = "give a scheduler cycle_momentum=False, or capture again"
                problems.append(
                    f"group {index} of the optimizer has {key} {value!r}, captured with {was!r}; "
                    f"{remedy}"
                )
    return problems


@contextmanager
def swapped_optimizer(
    optimizer: torch.optim.Optimizer | None,
    traced: dict[int, torch.Tensor],
    names: Mapping[int, str],
) -> Iterator[None]:
    """Let the optimizer step on the traced parameters.

    Args:
        optimizer: None if the step has none.
        traced: stand-ins by the ids of the real parameters.
        names: of the real parameters, by their ids.

    Raises:
        CaptureError: on leaving, if the step created optimizer state or changed numbers of
            parameter groups, which a replay would lose; or if another optimizer stepped.
    """
    others: dict[int, str] = {}

    def note_step(stepping: torch.optim.Optimizer, *_: Any) -> None:
        if stepping is not optimizer:
            others[id(stepping)] = type(stepping).__name__

    hook: Any = register_optimizer_step_pre_hook(note_step)
    try:
        with _swapped(optimizer, traced, names):
            yield
    finally:
        hook.remove()
    if others:
        given = "" if optimizer is None else " beside the one that was given"
        raise CaptureError(
            f"{', '.join(others.values())} steps inside of the step{given}, so that its "
            "hyperparameters and its state would be constants; give the one optimizer of the step "
            "(trace_step(step, module=model, optimizer=optimizer)), or step outside of the capture"
        )


@contextmanager
def _swapped(
    optimizer: torch.optim.Optimizer | None,
    traced: dict[int, torch.Tensor],
    names: Mapping[int, str],
) -> Iterator[None]:
    if optimizer is None:
        yield
        return
    before = captured_groups(optimizer, names)
    groups = [dict(group) for group in optimizer.param_groups]
    state = dict(optimizer.state)
    known = {(id(parameter), key) for parameter, value in state.items() for key in value}
    real_of = {id(tensor): real for real, tensor in traced.items()}
    try:
        for group in optimizer.param_groups:
            group["params"] = [traced[id(parameter)] for parameter in group["params"]]
        optimizer.state.clear()
        for parameter, value in state.items():
            optimizer.state[traced[id(parameter)]] = value
        yield
        created = sorted(
            {
                key
                for parameter, value in optimizer.state.items()
                for key in value
                if (real_of[id(parameter)], key) not in known
            }
        )
        stand_ins = {id(tensor): names[real] for real, tensor in traced.items() if real in names}
        after = captured_groups(optimizer, stand_ins)
    finally:
        for group, held in zip(optimizer.param_groups, groups, strict=False):
            group.clear()
            group.update(held)
        optimizer.state.clear()
        optimizer.state.update(state)
    if created:
        raise CaptureError(
            f"{type(optimizer).__name__}.step created the state {created} during the "
            "capture, and a replay would lose it; run one step, or initialise the state, "
            "before capturing"
        )
    if problems := group_problems(before, after):
        raise CaptureError(
            "the step changes its optimizer, which a replay would not do; do it outside of the "
            "step:\n  " + "\n  ".join(problems)
        )


def refuse_set_hyperparameters(graph_module: GraphModule, inputs: Sequence[GraphInput]) -> None:
    """Refuse a step that sets a hyperparameter to a number, as a scheduler does.

    Raises:
        CaptureError: lists each.
    """
    problems: dict[str, None] = {}
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    for node, each in zip(placeholders, inputs, strict=True):
        if each.kind != "optimizer_state" or not each.name.startswith("group "):
            continue
        for user in node.users:
            schema = getattr(user.target, "_schema", None)
            if schema is not None and schema.name in _SETS and user.args[0] is node:
                problems[each.name] = None
    if problems:
        raise CaptureError(
            "the step sets hyperparameters of its optimizer to values that would be the same in "
            "each replay, as a learning rate scheduler does; let schedulers step outside of the "
            "step:\n  " + "\n  ".join(problems)
        )


def _constants(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_tensors(value)
        for key, value in group.items()
        if key not in _NO_HYPERPARAMETERS and not isinstance(value, torch.Tensor)
    }


def _without_tensors(value: Any) -> Any:
    if not isinstance(value, tuple | list):
        return value
    return tuple("a tensor" if isinstance(each, torch.Tensor) else each for each in value)


def _is_same(value: Any, captured: Any) -> bool:
    if value is captured:
        return True
    if isinstance(value, tuple | list):
        value = _without_tensors(value)
    if isinstance(value, torch.Tensor):
        return False
    return bool(value == captured) or (value != value and captured != captured)
