"""Numbers, texts and functions outside of tensors that a captured step may read.

A graph has them as constants: the probability of a dropout, a number in a closure, an activation
function. They are noted at the capture and compared at each call, by identity. Where an identity
differs, all are read again and compared by value. Attributes and globals are compared if the code
that the step can reach mentions their names.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import getitem, is_
from typing import Any

import torch
from torch import nn

from gt_trace.annotate import REPLACED
from gt_trace.capture.python_holders import (
    BUFFER,
    CACHE,
    CELL,
    CLASS,
    DEQUE,
    ENVIRONMENT,
    GLOBALS,
    ITERATOR,
    LIST,
    MAPPING,
    MISSING,
    NUMBERS,
    OBJECT,
    SET,
    VARIABLE,
    Holder,
    keys_of_mapping,
    short,
)
from gt_trace.capture.python_state import BY_VALUE, NO_STATE, PythonState, is_same

_MOST_ITEMS = 1_000
"""Longer containers are data, and not compared."""

_MOST_LINES = 20
_CONSTANTS = (
    *BY_VALUE,
    *(enum.Enum, types.FunctionType, types.MethodType, types.BuiltinFunctionType),
)
_TABLES = ("_modules", "_parameters", "_buffers")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """Names in the code that a step can reach."""

    attributes: set[str]
    mentioned: set[str]
    of_globals: Mapping[int, set[str]]
    starts: set[str]
    """Places at which nothing else leads to an object: roots, closures, globals and classes."""


_ARGUMENTS = ("args", "kwargs", "argument ")
"""How the names of roots begin that are compared with the arguments."""


class ReadValues:
    """Values that a step may read.

    Args:
        roots: the objects at which the walk begins, by name.
        state: of ``roots``, from before the step ran; None for that of now.
        names: those of other values, of which these are the present ones.
    """

    def __init__(
        self,
        roots: Mapping[str, object],
        state: PythonState | None = None,
        *,
        names: _Names | None = None,
    ) -> None:
        self.roots = {name: root for name, root in roots.items() if not name.startswith(_ARGUMENTS)}
        self._values: dict[str, Any] = {}
        """Values by place, for messages and for a comparison of all."""

        self._tables: list[Any] = []
        self._keys: list[Any] = []
        self._in_tables: list[Any] = []
        self._objects: list[Any] = []
        self._names: list[str] = []
        self._in_objects: list[Any] = []
        self._sized: list[Any] = []
        self._ordered: list[Any] = []
        self._in_order: list[Any] = []
        self._copied: list[Holder] = []
        optimizer: Any = self.roots.get("optimizer")
        state = state or PythonState(self.roots, optimizer=optimizer)
        self._reads = names or _Names(
            attributes=state.attributes - NO_STATE - {"training"},
            mentioned=state.mentioned,
            of_globals=state.read_globals,
            starts={
                each.parent
                for each in state.nodes
                if isinstance(each.parent, str) and not each.parent.startswith(_ARGUMENTS)
            },
        )
        self._read(state)
        self._sizes = [*map(len, self._sized)]

    def __deepcopy__(self, memo: dict[int, Any]) -> ReadValues:
        return self  # of the same objects

    def problems(self, *, is_replaced: bool) -> list[str]:
        """Return a sentence for each value that is another now.

        Args:
            is_replaced: whether tensors or submodules may have been replaced since the last call.
        """
        if not is_replaced and self._is_current():
            return []
        now = ReadValues(self.roots, names=self._reads)
        problems = self.differences(now)
        if not problems:
            vars(self).update(vars(now))
        return problems

    def of(self, roots: Mapping[str, object]) -> ReadValues:
        """Return the values for other roots of the same names."""
        if all(self.roots.get(name) is root for name, root in roots.items()):
            return self
        return ReadValues({**self.roots, **roots}, names=self._reads)

    def differences(self, now: ReadValues) -> list[str]:
        """Return a sentence for each value that is another in ``now``."""
        ours, theirs = self._values, now._values
        changed = [
            (place, ours.get(place, MISSING), theirs.get(place, MISSING))
            for place in dict.fromkeys((*ours, *theirs))
            if ours.get(place, MISSING) is not theirs.get(place, MISSING)
        ]
        problems = [
            f"{place} {_is_now(value)}, and {_was(before)} when the step was captured"
            for place, before, value in changed
            if not is_same(before, value) and (before is not MISSING or self.roots == now.roots)
        ]
        if len(problems) > _MOST_LINES:
            problems[_MOST_LINES:] = [f"... and {len(problems) - _MOST_LINES} more"]
        return problems

    def _is_current(self) -> bool:
        try:
            return (
                _are_known(map(getitem, self._tables, self._keys), self._in_tables)
                and _are_known(map(getattr, self._objects, self._names), self._in_objects)
                and [*map(len, self._sized)] == self._sizes
                and _are_known(
                    chain.from_iterable(map(keys_of_mapping, self._ordered)), self._in_order
                )
                and all(is_same(each.before, each.kind.read(each.target)) for each in self._copied)
            )
        except (LookupError, AttributeError, ValueError):  # a place is gone
            return False

    def _read(self, state: PythonState) -> None:
        seen: set[int] = set()
        pending = [
            holder
            for holder in state.nodes
            if isinstance(holder.parent, str) and holder.parent in self._reads.starts
        ]
        nodes: dict[int, list[Holder]] = {}
        for holder in state.nodes:
            nodes.setdefault(id(holder.target), []).append(holder)
        while pending:
            holder = pending.pop()
            if id(holder) in seen or holder.kind in (ITERATOR, CACHE, NUMBERS):
                continue
            seen.add(id(holder))
            if holder.kind in (SET, BUFFER, VARIABLE):
                self._copied.append(Holder(holder.kind, holder.target, holder.before, "", None))
                self._values[holder.path] = holder.before
            elif holder.kind in (LIST, MAPPING, DEQUE) and not (
                _is_table(holder) or _optimizer_of(holder) is not MISSING
            ):
                is_ordered = holder.kind is MAPPING and len(holder.before) <= _MOST_ITEMS
                what, known = (
                    ("list of keys", (*holder.before,))
                    if is_ordered
                    else ("length", len(holder.before))
                )
                self._values[f"the {what} of {holder.path}"] = known
                if not isinstance(holder.target, tuple | frozenset):
                    self._sized.append(holder.target)
                if is_ordered:
                    self._ordered.append(holder.target)
                    self._in_order += holder.before
            elif holder.kind is OBJECT and not isinstance(holder.target, types.FunctionType):
                self._sized.append(getattr(holder.target, "__dict__", ()))
            for key, value in _read_of(holder, self._reads, self.roots.get("optimizer")):
                for entered in state.entered.get((id(holder), id(key)), ()):
                    pending += nodes.get(entered, ())
                self._note(holder, key, value)

    def _note(self, holder: Holder, key: Any, value: Any) -> None:
        target, kind = holder.target, holder.kind
        if isinstance(value, nn.Module):
            self._values[f"the class of {holder.place(key)}"] = type(value).__qualname__
        if kind in (SET, BUFFER, VARIABLE):  # compared as a whole
            return
        if isinstance(value, torch.Tensor) or key in _TABLES:
            return
        if isinstance(value, _CONSTANTS):
            self._values[holder.place(key)] = value
        if isinstance(target, tuple | frozenset):
            return
        if kind in (LIST, MAPPING, DEQUE, GLOBALS, ENVIRONMENT):
            table = target
        else:
            table = getattr(target, "__dict__", {})
        if kind is CELL or key not in (table if isinstance(table, Mapping) else (key,)):
            self._objects.append(target)
            self._names.append(key or "cell_contents")
            self._in_objects.append(value)
        else:
            self._tables.append(table)
            self._keys.append(key)
            self._in_tables.append(value)


def _read_of(holder: Holder, names: _Names, optimizer: object) -> Iterator[tuple[Any, Any]]:
    """Yield what the code that was met may read of an object."""
    kind, held = holder.kind, holder.before
    if kind in (OBJECT, CLASS):
        always = {*_TABLES, *_OPTIMIZER_HOOKS} if kind is OBJECT else set()
        held = kind.read(holder.target)  # without the wrappers of a trace
        for key in held.keys() & (names.mentioned | always):
            value = held[key]
            own = getattr(value, "__dict__", {})
            if REPLACED in own:
                if not own[REPLACED]:
                    continue
                (value,) = own[REPLACED]
            if key == "step" and hasattr(
                value, "_wrapped_by_lr_sched"
            ):  # schedulers count the steps of optimizers
                continue
            # A number is not called.
            if key in names.attributes or key in always or not isinstance(value, BY_VALUE):
                yield key, value
    elif (of_group := _optimizer_of(holder)) is not MISSING:
        read = names.mentioned
        if of_group is optimizer:  # all else is compared by ``BoundOptimizer``
            read = read & {"initial_lr"}
        yield from ((key, held[key]) for key in held.keys() & read)
    elif kind is GLOBALS or kind is ENVIRONMENT:
        is_module = kind is GLOBALS
        read = names.of_globals.get(id(holder.target), set()) if is_module else names.mentioned
        yield from ((key, held[key]) for key in held.keys() & read)
    elif len(held) <= _MOST_ITEMS or _is_table(holder):
        yield from held.items()


def _is_table(holder: Holder) -> bool:
    parent = holder.parent
    return holder.key in _TABLES and not isinstance(parent, str) and parent.kind is OBJECT


def _optimizer_of(group: Holder) -> object:
    """Return the optimizer of a parameter group; ``MISSING`` for what is none."""
    groups = group.parent
    if isinstance(groups, str) or groups.key != "param_groups" or isinstance(groups.parent, str):
        return MISSING
    return groups.parent.target


def _are_known(values: Iterator[Any], known: list[Any]) -> bool:
    """Whether values are the known ones, or equal numbers, which become known."""
    now = [*values]
    if all(map(is_, now, known)):
        return True
    for index, (value, was) in enumerate(zip(now, known, strict=True)):
        if value is not was:
            if not isinstance(was, BY_VALUE) or not is_same(was, value):
                return False
            known[index] = value
    return True


def _is_now(value: Any) -> str:
    return "is gone" if value is MISSING else f"is {short(value)}"


def _was(value: Any) -> str:
    return "was missing" if value is MISSING else f"was {short(value)}"
