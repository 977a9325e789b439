"""Numbers, texts and functions outside of tensors that a captured step may read.

A graph has them as constants: the probability of a dropout, a number in a closure, an activation
function. They are noted at the capture and compared at each call, by identity. Where an identity
differs, all are read again and compared by value. Attributes are compared that the step read while
it was captured; globals, and attributes whose reads cannot be noted, if the code that the step can
reach mentions their names.
"""

from __future__ import annotations

import enum
import functools
import operator
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from gt_trace.annotate import REPLACED
from gt_trace.capture.attribute_reads import ALL
from gt_trace.capture.code_digest import code_digest
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
    short_text,
    slots_of,
)
from gt_trace.capture.python_state import (
    BY_VALUE,
    HAVE_READS_APART,
    INSTALLED,
    NO_STATE,
    PythonState,
    is_for_readers,
    is_same,
)

_MOST_ITEMS = 10_000
"""Longer containers are data, and not compared."""

_MOST_LINES = 20
_NUM_DIGITS = 12
"""Of the digest of a function's code, enough to tell it from another one."""

_CONSTANTS = (
    *BY_VALUE,
    *(enum.Enum, types.FunctionType, types.MethodType, types.BuiltinFunctionType, type),
    *(types.CodeType, property, staticmethod, classmethod, functools.cached_property),
    *(operator.attrgetter, operator.itemgetter, operator.methodcaller),
    *(type(torch.ops.aten.relu), type(torch.ops.aten.relu.default)),
)
_TABLES = ("_modules", "_parameters", "_buffers")
_ELSEWHERE = NO_STATE | {"training"}
"""Attributes that hold nothing for a graph, or are compared by ``ModeGuard``."""

_METHODS = frozenset(name for name in vars(nn.Module) if name.startswith("_")) - {ALL}
"""Private methods of modules, which PyTorch calls."""

_READ_ANY = frozenset({"getattr", "hasattr", "vars", "attrgetter", ALL})
"""Names in code that may read any attribute of an object whose reads cannot be noted."""

_READ_BY_DYNAMO = frozenset(
    {"flex_attention", "cond", "while_loop", "scan", "associative_scan", "map"}
)
"""Functions of PyTorch that are given functions, whose code Dynamo reads."""

_PAST_LOOKUP = frozenset({"__getattribute__", "getattr_static"})
"""Functions that read attributes past the lookup of the object's class."""

_MAKE = frozenset({"__init__", "__post_init__", "__init_subclass__", "__set_name__"})
"""Methods that make objects and classes, mostly before a step runs. Trackers replace them."""

_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """Names of what a step read, and names in the code that it can reach."""

    noted: Mapping[str, frozenset[str]]
    """Attributes that were read of objects, by their places."""

    of_classes: Mapping[str, frozenset[str]]
    """Attributes that were read of instances of classes, by the places of the classes."""

    attributes: set[str]
    mentioned: set[str]
    of_globals: Mapping[int, set[str]]
    starts: set[str]
    """Places at which nothing else leads to an object: roots, closures, globals and classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredValues:
    """Numbers, texts and names of functions that a stored step read of its module.

    Objects that the step had by closure are not in the file, and are not compared.
    """

    texts: Mapping[str, str]
    """The values as texts, by their places."""

    noted: Mapping[str, Sequence[str]]
    """Names of the attributes that the step read, by the places of the objects."""

    of_classes: Mapping[str, Sequence[str]]
    """Names of the attributes that the step read of instances, by the places of their classes."""

    def of(self, roots: Mapping[str, object]) -> ReadValues:
        """Return what the step would read of the module among ``roots``."""
        return ReadValues(
            {"module": roots.get("module")}, names=_names_for_module(self.noted, self.of_classes)
        )

    def differences(self, now: ReadValues) -> list[str]:
        """Return a sentence for each value that is another in ``now``."""
        present = now.texts()
        attributes = (
            f"{place}.{key}"
            for place, keys in now.compared.items()
            if place in self.noted
            for key in keys
        )
        changed = [
            place
            for place in dict.fromkeys((*self.texts, *attributes))
            if present.get(place) != self.texts.get(place)
        ]
        return _at_most([f"{place} {self._now_and_then(place, present)}" for place in changed])

    def _now_and_then(self, place: str, present: Mapping[str, str]) -> str:
        now = f"is {short_text(present[place])}" if place in present else "is gone"
        was = short_text(self.texts[place]) if place in self.texts else "missing or an object"
        return f"{now}, and was {was} when the step was captured"


def _names_for_module(
    noted: Mapping[str, Iterable[str]], of_classes: Mapping[str, Iterable[str]]
) -> _Names:
    """Return names of which only those count that were noted of the module and its classes."""
    return _Names(
        noted={place: frozenset(names) for place, names in noted.items()},
        of_classes={place: frozenset(names) for place, names in of_classes.items()},
        attributes=set(),
        mentioned=set(),
        of_globals={},
        starts={"module", *of_classes},
    )


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

        self._of_objects: dict[tuple[int, int, Any], tuple[str, Any, Any]] = {}
        """Places, values and objects by the ids of these: two closures may have one place."""

        self._special: set[str] = set()
        """Places of special methods of classes."""

        self._tables: list[Any] = []
        self._keys: list[Any] = []
        self._in_tables: list[Any] = []
        self._objects: list[Any] = []
        self._names: list[str] = []
        self._in_objects: list[Any] = []
        self._sized: list[Any] = []
        self._typed: list[Any] = []
        self._types: list[Any] = []
        self._ordered: list[Any] = []
        self._in_order: list[Any] = []
        self._copied: list[Holder] = []
        self.compared: dict[str, set[str]] = {}
        """Names of the attributes that are compared, by the places of all that is walked."""

        optimizer: Any = self.roots.get("optimizer")
        state = state or PythonState(self.roots, optimizer=optimizer)
        self._reads = names or _Names(
            noted=_noted_in(state, self.roots.get("module")),
            of_classes=_noted_of_instances(state),
            attributes=state.attributes - NO_STATE,
            mentioned=state.mentioned,
            of_globals=state.read_globals,
            starts={
                each.parent
                for each in state.nodes
                if isinstance(each.parent, str) and not each.parent.startswith(_ARGUMENTS)
            },
        )
        self._read(state)
        if (module := self.roots.get("module")) is not None:
            self._values["the class of module"] = type(module).__qualname__
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
        changed += [
            (place, before, now._of_objects[owner][1])
            for owner, (place, before, _) in self._of_objects.items()
            if owner in now._of_objects and now._of_objects[owner][1] is not before
        ]
        lines = [
            f"{place} {_is_now(value)}, and {_was(before)} when the step was captured"
            for place, before, value in changed
            if not is_same(before, value) and (before is not MISSING or self.roots == now.roots)
        ]
        return _at_most([*dict.fromkeys(lines)])

    def texts(self) -> dict[str, str]:
        """Return numbers, texts and names of functions as texts, by their places.

        Special methods of classes are left out: a walk from a module does not reach all classes.
        """
        return {
            place: text
            for place, value in self._values.items()
            if place not in self._special and (text := _text_of(value))
        }

    def stored(self) -> StoredValues | None:
        """Return what of this a file holds; None without a module."""
        module = self.roots.get("module")
        if module is None:
            return None
        of_classes = self._reads.of_classes
        noted = {**self.compared, **self._reads.noted}  # of some objects no reads can be noted
        of_module = ReadValues({"module": module}, names=_names_for_module(noted, of_classes))
        texts = self.texts()
        return StoredValues(
            texts={place: texts[place] for place in of_module.texts() if place in texts},
            noted={
                place: sorted(names)
                for place, names in noted.items()
                if names and place in of_module.compared
            },
            of_classes={
                place: sorted(names)
                for place, names in of_classes.items()
                if names and place in of_module.compared
            },
        )

    def _is_current(self) -> bool:
        try:
            return (
                _are_known(map(operator.getitem, self._tables, self._keys), self._in_tables)
                and _are_known(map(getattr, self._objects, self._names), self._in_objects)
                and [*map(len, self._sized)] == self._sizes
                and _are_known(map(type, self._typed), self._types)
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
            compared = self.compared.setdefault(holder.path, set())
            if holder.kind in (SET, BUFFER, VARIABLE):
                self._copied.append(Holder(holder.kind, holder.target, holder.before, "", None))
                held = holder.before
                self._values[holder.path] = held if holder.kind is SET else held.get("", MISSING)
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
                self._typed.append(holder.target)
                self._types.append(type(holder.target))
            for key, value in _read_of(holder, self._reads, self.roots.get("optimizer")):
                for entered in state.entered.get((id(holder), id(key)), ()):
                    pending += nodes.get(entered, ())
                if holder.kind is OBJECT:
                    compared.add(key)
                self._note(holder, key, value)

    def _note(self, holder: Holder, key: Any, value: Any) -> None:
        target, kind = holder.target, holder.kind
        place, is_constant = holder.place(key), isinstance(value, _CONSTANTS)
        is_attribute = kind in (OBJECT, CLASS, GLOBALS) and key not in _TABLES
        is_part = key in _parts_of(target)
        if isinstance(value, nn.Module) or (is_attribute and not (is_constant or is_part)):
            self._values[f"the class of {place}"] = type(value).__qualname__
        if kind in (SET, BUFFER, VARIABLE):  # compared as a whole
            return
        if isinstance(value, torch.Tensor) or key in _TABLES:
            return
        if is_constant and not is_part:  # the parts of a replaced function are no change
            self._values[place] = value
        if is_constant or is_part:
            self._of_objects[id(target), id(kind), key] = place, value, target
        if kind is CLASS and key.startswith("__"):
            self._special.add(place)
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
        held = kind.read(holder.target)  # without the wrappers of a trace
        always = _always_read(holder.target, held)
        noted = _noted_of(holder, names)
        if noted is None:
            read = names.of_classes.get(holder.path, frozenset()) | always
            found = read.union(names.mentioned)
        else:
            is_module = isinstance(holder.target, nn.Module)
            apart = _ELSEWHERE if is_module else _parts_of(holder.target)
            read = always | (held.keys() - apart if ALL in noted else noted)
            found = read
        for key in [each for each in held if each in found]:
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
            if key in read or key in names.attributes or not isinstance(value, BY_VALUE):
                yield key, value
    elif (of_group := _optimizer_of(holder)) is not MISSING:
        # All else of a captured optimizer is compared by ``BoundOptimizer``.
        of_it = names.mentioned & {"initial_lr"} if of_group is optimizer else names.mentioned
        yield from ((key, held[key]) for key in held.keys() & of_it)
    elif kind is GLOBALS or kind is ENVIRONMENT:
        of_module = names.of_globals.get(id(holder.target), set())
        mentioned = of_module if kind is GLOBALS else names.mentioned
        yield from ((key, held[key]) for key in held.keys() & mentioned)
    elif len(held) <= _MOST_ITEMS or _is_table(holder):
        yield from held.items()


def _parts_of(target: object) -> frozenset[str]:
    """Return the names of what a function consists of; none for other objects."""
    return frozenset(slots_of(target) if isinstance(target, types.FunctionType) else ())


def _always_read(target: object, held: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of what no code mentions that reads it."""
    if isinstance(target, types.FunctionType):
        is_installed = target.__code__.co_filename.startswith(INSTALLED)  # nobody edits these
        apart = {"__code__"} if is_installed else set[str]()
        return frozenset(key for key in _parts_of(target) if held[key] is not None) - apart
    if isinstance(target, type):  # special methods
        return frozenset(
            key
            for key, value in held.items()
            if key.startswith("__") and key not in _MAKE and not is_for_readers(key, value)
        )
    return frozenset({*_TABLES, *_OPTIMIZER_HOOKS})


def _noted_of(holder: Holder, names: _Names) -> frozenset[str] | None:
    """Return the names that the step read of an object; None if its code tells."""
    if holder.kind is not OBJECT:
        return None
    noted = names.noted.get(holder.path)
    if (
        noted is None
        and names.mentioned & _READ_ANY
        and not isinstance(holder.target, HAVE_READS_APART)
    ):
        return frozenset({ALL})
    return noted


def _noted_in(state: PythonState, module: object) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    if (reads := state.reads) is None:
        return found
    # Dynamo reads the functions that are given to some, and nothing of that is noted.
    is_read_apart = (_READ_BY_DYNAMO | _PAST_LOOKUP) & state.mentioned
    of_functions = state.mentioned if is_read_apart else set[str]()
    guarded = {*map(id, module.modules())} if isinstance(module, nn.Module) else set[int]()
    for holder in state.nodes:
        if holder.kind is OBJECT and (names := reads.of(holder.target)) is not None:
            read = names | (of_functions & holder.before.keys())
            if isinstance(holder.target, nn.Module):
                read -= NO_STATE | _METHODS
                read -= {"training"} if id(holder.target) in guarded else set()
            found[holder.path] = found.get(holder.path, frozenset()) | read
    return found


def _noted_of_instances(state: PythonState) -> dict[str, frozenset[str]]:
    if (reads := state.reads) is None:
        return {}
    return {
        holder.path: frozenset(reads.of_instances(holder.target) - NO_STATE)
        for holder in state.nodes
        if holder.kind is CLASS
    }


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
    if all(map(operator.is_, now, known)):
        return True
    for index, (value, was) in enumerate(zip(now, known, strict=True)):
        if value is not was:
            if not isinstance(was, BY_VALUE) or not is_same(was, value):
                return False
            known[index] = value
    return True


def _text_of(value: Any) -> str:
    """Return what a file holds of a value, equal in all processes; "" if there is none."""
    if isinstance(value, BY_VALUE):
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, tuple) and all(isinstance(each, BY_VALUE) for each in value):
        return repr(value)
    if isinstance(value, types.MethodType):
        return _text_of(value.__func__)
    if isinstance(value, types.FunctionType):
        return f"{value.__qualname__} (code {code_digest(value.__code__)[:_NUM_DIGITS]})"
    if isinstance(value, types.BuiltinFunctionType | type):
        return value.__qualname__  # the module is "__main__" where a model's file is the program
    return ""


def _at_most(problems: list[str]) -> list[str]:
    if len(problems) > _MOST_LINES:
        problems[_MOST_LINES:] = [f"... and {len(problems) - _MOST_LINES} more"]
    return problems


def _is_now(value: Any) -> str:
    return "is gone" if value is MISSING else f"is {short(value)}"


def _was(value: Any) -> str:
    return "was missing" if value is MISSING else f"was {short(value)}"
