"""Python objects that a step can reach: what they hold, read before and after the step ran.

A walk starts at the module, the step, the optimizer and the arguments. It follows attributes of
modules and plain objects, containers, iterators, hooks and closures, and the classes, globals and
imports of the code that it meets. Methods and classes that a class or a module holds are followed
if code that was met mentions their names. Each object that Python can change is a holder; its
contents are copied one level deep. Objects of PyTorch and tensors are not entered, and of the
standard library only those that hold what a user gave them.
"""

from __future__ import annotations

import array
import contextvars
import datetime
import functools
import gc
import logging
import numbers
import operator
import os
import pathlib
import random
import re
import sys
import threading
import types
import uuid
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gt_trace._torch_internals import is_fake
from gt_trace.annotate import REPLACED
from gt_trace.capture.attribute_reads import AttributeReads
from gt_trace.capture.mentioned_names import MentionedNames, names_in, names_of_class
from gt_trace.capture.python_holders import (
    BUFFER,
    C_DATA,
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
    ORDER,
    SET,
    VARIABLE,
    Change,
    Holder,
    Kind,
    contents_of_cell,
    contents_of_object,
    named_values,
    numbered,
    results_in_cache,
)
from gt_trace.capture.random_generators import HeldGenerator, generator_types
from gt_trace.capture.stand_ins import is_live

_FOREIGN = frozenset({"torch", "numpy", *sys.builtin_module_names, *sys.stdlib_module_names}) - {
    "__main__"
}
_OWN = frozenset({"gt_config", "gt_trace", "gt_passes", "gt_pipeline", "gt_autoparallel"})
_HOLD_FOR_USERS = frozenset(
    {"_weakrefset", "argparse", "collections", "configparser", "contextlib", "enum", "functools"}
    | {"queue", "weakref"}
)
"""Packages of the standard library whose objects hold those of users."""

_SHARED = "multiprocessing.sharedctypes"
"""The module of numbers that processes share, as ``multiprocessing.Value``."""

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes in which a module keeps the hooks of its calls."""

_STATE_OF_MODULES = frozenset(
    {"training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
)
NO_STATE = frozenset({*vars(nn.Module()), *HOOKS, "_opt_called"} - _STATE_OF_MODULES)
"""Attributes that no replay needs. Hooks are compared by ``with_settled_hooks``."""

HAVE_READS_APART = (torch.Tensor, torch.optim.Optimizer)
"""Classes whose attributes torch reads all the time. What users read is told by their code."""

_OF_PARAMETERS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Attributes in which PyTorch's recurrent layers list their parameters at each call."""

_MOST_ENTERED = 10_000
"""Larger containers are compared, and what they hold is not entered."""

_MOST_CLASSES = 4096
_MOST_DEPTH = 20
_CALLED_BY_TORCH = frozenset({"forward", "backward", "setup_context", "jvp", "vjp", "vmap"})
_OF_ITERATORS = frozenset({"builtins", "itertools", "collections", "_collections"})
INSTALLED = os.path.dirname(os.path.dirname(torch.__file__)) + os.sep
"""Folder of installed packages. Modules there that do not import PyTorch are libraries."""

_CODE = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)


class PythonState:
    """Contents of the objects that are reached from ``roots``, as they are now.

    Args:
        roots: objects, by how a message names them.
        optimizer: its tensors are left out, since they are part of the state of the step.
    """

    def __init__(
        self, roots: Mapping[str, object], *, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self.generators: list[HeldGenerator] = []
        """Random number generators that were reached."""

        self.mentioned: set[str] = set(_CALLED_BY_TORCH)
        """Names that the code that was met mentions."""

        self.attributes: set[str] = set()
        """Names of attributes that the code reads."""

        self.read_globals: dict[int, set[str]] = {}
        """Names of globals that the code reads, by the id of their dictionary."""

        self.nodes: list[Holder] = []
        """Entered objects that have contents: holders, and tuples."""

        self.entered: dict[tuple[int, int], list[int]] = {}
        """Ids of what was reached from a holder, by the ids of the holder and the key."""

        self.reads: AttributeReads | None = None
        """What was read inside of ``noted_reads``."""

        self._holders: list[Holder] = []
        # Everything entered is kept, so that no id is used twice.
        self._seen: dict[int, Any] = {}
        self._optimizer = optimizer
        self._found: list[tuple[Holder, dict[Any, Any]]] | None = None
        self._entered_classes: dict[int, type] = {}
        self._libraries: dict[int, tuple[types.ModuleType, set[str]]] = {}
        self._entered_modules: set[tuple[int, frozenset[str]]] = set()
        self._pending: list[tuple[Any, Holder | str, Any]] = []
        self._code: list[Callable[[], None]] = []
        self._waiting: dict[str, list[tuple[Any, Holder | str, Any]]] = {}
        self._hold(ENVIRONMENT, os.environ, "os.environ", None)
        self.type_readers: dict[int, dict[str, Any]] = {}
        """Globals of the modules whose code names ``type``, by their ids."""

        for label, value in roots.items():
            self._enter(value, label, None)
            # First what is reached by attributes, so that places have their usual names.
            while self._pending:
                self._enter(*self._pending.pop())
        while self._code:
            self._code.pop()()
            while self._pending:
                self._enter(*self._pending.pop())
        for module, names in self._libraries.values():
            self._hold(named_values(frozenset(names)), module, module.__name__, None)

    def changes(self) -> list[Change]:
        """Return what is different now, except values that equal those before."""
        found: list[Change] = []
        self._found = list(self._changed())
        for holder, after in self._found:
            before = holder.before
            for key in {**before, **after}:
                old, new = before.get(key, MISSING), after.get(key, MISSING)
                if (
                    old is not new
                    and key not in NO_STATE | _OF_PARAMETERS
                    and not is_same(old, new)
                ):
                    found.append(Change(holder=holder, key=key, before=old, after=new))
            if holder.kind is MAPPING and _is_reordered(before, after):
                found.append(Change(holder=holder, key=ORDER, before=[*before], after=[*after]))
        return found

    def restore(self) -> list[tuple[Holder, dict[Any, Any]]]:
        """Let every object hold what it held; return what objects held that have changed.

        Nothing may have changed since ``changes`` was called.
        """
        changed = list(self._changed()) if self._found is None else self._found
        for holder, _ in changed:
            holder.kind.write(holder.target, holder.before)
        return changed

    @contextmanager
    def noted_reads(self) -> Iterator[None]:
        """Note in ``reads`` which attributes of the objects are read inside."""
        no_reads = (*HAVE_READS_APART, type)
        reads = AttributeReads(
            holder.target
            for holder in self._holders
            if holder.kind is OBJECT and not isinstance(holder.target, no_reads)
        )
        with reads.noted():
            yield
        self.reads = reads

    def _changed(self) -> Iterator[tuple[Holder, dict[Any, Any]]]:
        for holder in self._holders:
            before, after = holder.before, holder.kind.read(holder.target)
            same_places = before.keys() == after.keys() and (
                holder.kind is not MAPPING or not _is_reordered(before, after)
            )
            is_equal = is_same if holder.kind.copies else operator.is_
            if not (same_places and all(map(is_equal, before.values(), after.values()))):
                if holder.kind is OBJECT:  # hooks are no change
                    apart = {key: after[key] for key in after if key in NO_STATE}
                    holder.before.update(apart)
                yield holder, after

    def _hold(self, kind: Kind, target: Any, parent: Holder | str, key: Any) -> Holder:
        holder = Holder(kind, target, kind.read(target), parent, key)
        self._holders.append(holder)
        self.nodes.append(holder)
        return holder

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True

    def _enter(self, value: Any, parent: Holder | str, key: Any) -> None:
        how = _way_into(value)
        if how is None:
            return
        if not isinstance(parent, str):
            self.entered.setdefault((id(parent), id(key)), []).append(id(value))
        if self._is_new(value):
            how(self, value, parent, key)

    def _push(self, holder: Holder, values: Mapping[Any, Any] | None = None) -> None:
        held = holder.before if values is None else values
        if len(held) <= _MOST_ENTERED:
            self._pending += [
                (value, holder, key) for key, value in held.items() if _way_into(value) is not None
            ]

    def _push_mentioned(self, held: Mapping[str, Any], parent: Holder) -> None:
        """Enter what a class or a module holds; code, and what a module holds, once mentioned."""
        for key, value in held.items():
            is_code = isinstance(value, _CODE)
            is_dunder = key.startswith("__") and key != "__init__"
            if _way_into(value) is None or (
                is_dunder and (not is_code or is_for_readers(key, value))
            ):
                continue
            name = parent.key if key == "__init__" else key  # of the class
            is_named = is_code or isinstance(value, type) or parent.kind is GLOBALS
            if is_dunder or not is_named or name in self.mentioned:
                self._pending.append((value, parent, key))
            else:
                self._waiting.setdefault(name, []).append((value, parent, key))

    def _mention(self, names: MentionedNames) -> None:
        for name in names.all - self.mentioned:
            self._pending += self._waiting.pop(name, ())
        self.mentioned |= names.all
        self.attributes |= names.attributes

    def _object(self, value: Any, parent: Holder | str, key: Any) -> None:
        self._push(self._hold(OBJECT, value, parent, key))
        self._code.append(lambda: self._classes(type(value)))

    def _shallow(self, value: Any, parent: Holder | str, key: Any) -> None:
        self._hold(OBJECT, value, parent, key)

    def _module(self, value: nn.Module, parent: Holder | str, key: Any) -> None:
        holder = self._hold(OBJECT, value, parent, key)
        held = holder.before.items()
        self._push(holder, {key: each for key, each in held if key not in NO_STATE})
        for table in HOOKS:
            hooks = holder.before.get(table)
            if hooks:
                name = f"a hook of {holder.path}"
                self._pending += [(hook, name, None) for hook in hooks.values()]
        self._code.append(lambda: self._classes(type(value)))

    def _optimizer_object(self, value: Any, parent: Holder | str, key: Any) -> None:
        if value is not self._optimizer or self._optimizer is None:
            self._object(value, parent, key)
            return
        holder = self._hold(OBJECT, value, parent, key)
        self._push(holder, {key: each for key, each in holder.before.items() if key != "state"})
        self._code.append(lambda: self._classes(type(value)))
        for parameter, state in self._optimizer.state.items():
            if isinstance(state, dict):
                name = f"{holder.path}.state[a parameter of shape {list(parameter.shape)}]"
                self._hold(NUMBERS, state, name, None)

    def _container(self, value: Any, parent: Holder | str, key: Any) -> None:
        if isinstance(value, tuple | frozenset):  # Python changes only what it holds
            holder = Holder(LIST, value, numbered(value), parent, key)
            self.nodes.append(holder)
        else:
            holder = self._hold(_kind_of(value), value, parent, key)
        self._push(holder)
        if isinstance(value, defaultdict):
            self._pending.append((value.default_factory, parent, key))
        if type(value) not in _WITHOUT_ATTRIBUTES:
            self._object(value, parent, key)

    def _tensor(self, value: Any, parent: Holder | str, key: Any) -> None:
        if is_live(value):  # what Python set on it
            self._push(self._hold(OBJECT, value, parent, key))

    def _buffer(self, value: Any, parent: Holder | str, key: Any) -> None:
        self._hold(BUFFER, value, parent, key)

    def _variable(self, value: Any, parent: Holder | str, key: Any) -> None:
        self._push(self._hold(VARIABLE, value, f"the context variable {value.name}", None))

    def _iterator(self, value: Any, parent: Holder | str, key: Any) -> None:
        self._hold(ITERATOR, value, parent, key)
        self._inside(value, parent, key)

    def _inside(self, value: Any, parent: Holder | str, key: Any) -> None:
        """Enter what an object that is written in C refers to."""
        self._pending += [(each, parent, key) for each in gc.get_referents(value)]

    def _weak(self, value: Any, parent: Holder | str, key: Any) -> None:
        self._pending.append((value(), parent, key))

    def _generator(self, value: Any, parent: Holder | str, key: Any) -> None:
        if not isinstance(value, random.SystemRandom):
            place = parent if isinstance(parent, str) else parent.place(key)
            self.generators.append(HeldGenerator(name=f"the generator {place}", generator=value))

    def _partial(self, value: Any, parent: Holder | str, key: Any) -> None:
        self._push(self._hold(OBJECT, value, parent, key))
        self._pending += [(each, parent, key) for each in (value.func, value.args, value.keywords)]

    def _method(self, value: Any, parent: Holder | str, key: Any) -> None:
        if not isinstance(value.__self__, types.ModuleType):
            self._pending.append((value.__self__, parent, key))
        if isinstance(value, types.MethodType):
            self._pending.append((value.__func__, parent, key))

    def _cached(self, value: Any, parent: Holder | str, key: Any) -> None:
        name = f"the cache of {value.__qualname__}"
        self._hold(CACHE, value, name, None)
        for each in results_in_cache(value):
            is_held = _way_into(each) in (PythonState._container, PythonState._object)
            if is_held and not isinstance(each, tuple | frozenset) and self._is_new(each):
                self._hold(_kind_of(each), each, name, None)
        self._pending.append((value.__wrapped__, parent, key))

    def _own(self, value: Any, parent: Holder | str, key: Any) -> None:
        """Enter the modules and functions of an object of this project; its state is no user's."""
        self._pending += [
            (each, parent, key)
            for each in contents_of_object(value).values()
            if isinstance(each, nn.Module | types.FunctionType | types.MethodType)
        ]

    def _function(self, value: Any, parent: Holder | str, key: Any) -> None:
        self._code.append(lambda: self._enter_function(value, parent, key))

    def _enter_function(self, value: Any, parent: Holder | str, key: Any) -> None:
        cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        if _is_library(value.__globals__):
            # What a decorator wraps is a user's.
            held = [each for cell in cells.values() for each in contents_of_cell(cell).values()]
            held += [each for name, each in value.__dict__.items() if name != REPLACED]
            self._pending += [
                (each, parent, key)
                for each in held
                if not isinstance(each, dict | list | set | deque)
            ]
            return
        for name, cell in cells.items():
            if self._is_new(cell):
                self._push(self._hold(CELL, cell, f"{name} (of {value.__qualname__})", None))
        holder = self._hold(OBJECT, value, value.__qualname__, None)
        self._push(holder, value.__dict__)
        for each in (value.__defaults__, value.__kwdefaults__):
            self._pending.append((each, f"a default of {value.__qualname__}", None))
        found = names_in(value.__code__)
        names = found.all
        self._mention(found)
        self._globals(value.__globals__, names, found.globals)
        inside = value.__globals__.get("__package__")
        for name in names:
            for module in (sys.modules.get(name), sys.modules.get(f"{inside}.{name}")):
                if isinstance(module, types.ModuleType):
                    self._python_module(module, names, found.attributes)

    def _globals(self, held: dict[str, Any], names: frozenset[str], read: frozenset[str]) -> None:
        module = str(held.get("__name__", "executed code"))
        if _is_library(held):
            return
        if self._is_new(held):
            self._hold(GLOBALS, held, module, None)
        self.read_globals.setdefault(id(held), set()).update(read)
        if "type" in names:
            self.type_readers[id(held)] = held
        for name in names & held.keys():
            value = held[name]
            if isinstance(value, types.ModuleType):
                self._python_module(value, names, names)
            else:
                self._pending.append((value, f"{module}.{name}", None))

    def _python_module(
        self, module: types.ModuleType, names: frozenset[str], read: frozenset[str]
    ) -> None:
        key = id(module), names
        if key in self._entered_modules:
            return
        self._entered_modules.add(key)
        if _is_library(vars(module)):
            self._libraries.setdefault(id(module), (module, set()))[1].update(names)
        self._globals(vars(module), names, read)

    def _module_value(self, value: types.ModuleType, parent: Holder | str, key: Any) -> None:
        if not _is_library(vars(value)):
            holder = self._hold(GLOBALS, vars(value), value.__name__, None)
            self.read_globals.setdefault(id(vars(value)), self.attributes)
            self._push_mentioned(vars(value), holder)

    def _class(self, value: type, parent: Holder | str, key: Any) -> None:
        self._code.append(lambda: self._classes(value))

    def _classes(self, kind: Any) -> None:
        for each in kind.__mro__:
            if id(each) in self._entered_classes:
                continue
            self._entered_classes[id(each)] = each
            defined = sys.modules.get(each.__module__)
            if defined is None or not _is_library(vars(defined)):
                holder = self._hold(CLASS, each, each.__qualname__, each.__name__)
                self._push_mentioned(vars(each), holder)
                self._classes(type(each))
            elif issubclass(each, nn.Module) and each is not nn.Module:
                self._mention(names_of_class(each))


_Enter = Callable[[PythonState, Any, Any, Any], None]


@functools.lru_cache(maxsize=_MOST_CLASSES)
def _how_entered(kind: Any) -> _Enter | None:
    """Return the method that enters an object of that class; None if none is entered."""
    if issubclass(kind, generator_types()):
        return PythonState._generator
    for base, enter in _ENTERED.items():
        if issubclass(kind, base):
            return enter
    package = _package(kind.__module__)
    if package in _OWN:
        return PythonState._own
    if package == "numpy":
        return PythonState._buffer if issubclass(kind, sys.modules["numpy"].ndarray) else None
    if package in _FOREIGN - _HOLD_FOR_USERS and kind.__module__ != _SHARED:
        is_iterator = issubclass(kind, Iterator) and package in _OF_ITERATORS
        return PythonState._iterator if is_iterator else None
    return PythonState._object


_ENTERED: dict[type, _Enter | None] = {
    torch.Tensor: PythonState._tensor,
    type: PythonState._class,
    nn.Module: PythonState._module,
    torch.optim.Optimizer: PythonState._optimizer_object,
    torch.optim.lr_scheduler.LRScheduler: PythonState._object,
    torch.amp.GradScaler: PythonState._object,
    **dict.fromkeys((dict, list, deque, set, tuple, frozenset), PythonState._container),
    bytearray: PythonState._buffer,
    array.array: PythonState._buffer,
    C_DATA: PythonState._buffer,
    types.SimpleNamespace: PythonState._object,
    threading.local: PythonState._object,
    **dict.fromkeys((threading.Event, threading.Semaphore), PythonState._object),
    logging.Logger: PythonState._shallow,
    functools.partial: PythonState._partial,
    types.FunctionType: PythonState._function,
    types.MethodType: PythonState._method,
    types.BuiltinMethodType: PythonState._method,
    types.ModuleType: PythonState._module_value,
    contextvars.ContextVar: PythonState._variable,
    weakref.ref: PythonState._weak,
    functools._lru_cache_wrapper: PythonState._cached,
    **dict.fromkeys(
        (
            *(property, staticmethod, classmethod, types.MappingProxyType),
            *(type({}.keys()), type({}.values()), type({}.items())),
        ),
        PythonState._inside,
    ),
}

_WITHOUT_ATTRIBUTES = frozenset(
    {dict, list, set, tuple, frozenset, deque, OrderedDict, defaultdict, torch.Size}
)


def _kind_of(value: Any) -> Kind:
    """Return the kind of a container, or of an object."""
    return next((kind for base, kind in _KINDS.items() if isinstance(value, base)), OBJECT)


_KINDS: dict[type, Kind] = {
    dict: MAPPING,
    deque: DEQUE,
    set: SET,
    **dict.fromkeys((list, tuple, frozenset), LIST),
}


def _way_into(value: Any) -> _Enter | None:
    kind: Any = type(value)
    return _how_entered(kind)


def is_for_readers(name: str, method: Any) -> bool:
    """Return whether no graph depends on a special method: it makes text, or a copy.

    A comparison that was generated from fields, as of a dataclass, counts likewise.
    """
    is_generated = getattr(method, "__code__", _NO_CODE).co_filename.startswith("<")
    return name in _MAKE_COPIES or (name in _COMPARE and is_generated)


_NO_CODE = compile("", "", "exec")
_MAKE_COPIES = frozenset(
    {"__repr__", "__str__", "__format__", "__dir__", "__sizeof__", "__del__"}
    | {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"}
)
_COMPARE = frozenset({"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__"})


def _is_library(held: Mapping[str, Any]) -> bool:
    """Whether the globals are of a module that holds no state of users."""
    package = _package(held.get("__name__"))
    if package in _FOREIGN | _OWN:
        return True
    return "torch" not in held and str(held.get("__file__")).startswith(INSTALLED)


def _package(module: object) -> str:
    return str(module).partition(".")[0]


BY_VALUE = (
    *(bool, int, float, complex, str, bytes, type(None), range, slice),
    *(numbers.Number, *([numpy.generic] if (numpy := sys.modules.get("numpy")) else [])),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(datetime.date, datetime.time, datetime.timedelta, pathlib.PurePath, uuid.UUID, re.Pattern),
)


def _is_reordered(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> bool:
    """Return whether the keys that both have are in another order."""
    if all(map(operator.is_, before, after)):
        return False
    places = dict(zip(before, range(len(before)), strict=True))
    kept = [places[key] for key in after if key in places]
    return kept != sorted(kept)


def is_same(old: Any, new: Any, depth: int = 0) -> bool:
    """Whether two values are equal in everything except their identity."""
    if old is new:
        return True
    if type(old) is not type(new) or depth > _MOST_DEPTH:
        return False
    if isinstance(old, BY_VALUE):
        return repr(old) == repr(new)
    if isinstance(old, set | frozenset):
        return bool(old == new)
    if isinstance(old, types.MethodType):
        return old.__func__ is new.__func__ and old.__self__ is new.__self__
    if isinstance(old, types.FunctionType):
        cells = zip(old.__closure__ or (), new.__closure__ or (), strict=False)
        return (
            old.__code__ == new.__code__
            and is_same(old.__defaults__, new.__defaults__, depth + 1)
            and is_same(old.__kwdefaults__, new.__kwdefaults__, depth + 1)
            and is_same(old.__dict__, new.__dict__, depth + 1)
            and all(
                is_same(contents_of_cell(one), contents_of_cell(other), depth + 1)
                for one, other in cells
            )
        )
    if isinstance(old, types.CodeType):
        return bool(old == new)
    if isinstance(old, _DESCRIPTORS):
        return all(
            is_same(getattr(old, name, None), getattr(new, name, None), depth + 1)
            for name in _OF_DESCRIPTORS
        )
    enter = _way_into(old)
    if enter is PythonState._buffer:
        return _bytes_of(old) == _bytes_of(new)
    if enter is PythonState._iterator:
        one, other = ITERATOR.read(old), ITERATOR.read(new)
    elif enter in (PythonState._container, PythonState._object):
        kind = _kind_of(old)
        one, other = kind.read(old), kind.read(new)
        if kind is not OBJECT and type(old) not in _WITHOUT_ATTRIBUTES:
            one, other = {**one, "": OBJECT.read(old)}, {**other, "": OBJECT.read(new)}
    else:
        return False
    return list(one) == list(other) and all(
        is_same(value, other[key], depth + 1) for key, value in one.items()
    )


_DESCRIPTORS = (property, staticmethod, classmethod, functools.cached_property)
_OF_DESCRIPTORS = ("fget", "fset", "fdel", "__func__", "func")
"""Attributes in which these hold functions."""


def _bytes_of(value: Any) -> tuple[object, ...]:
    if hasattr(value, "tobytes"):
        return value.tobytes(), getattr(value, "shape", None), getattr(value, "dtype", None)
    return (bytes(value),)


def tensors_of(value: Any) -> bool:
    """Whether a value is, or holds, a tensor or a symbolic size that belongs to a trace."""
    pending, seen = [value], set()
    while pending:
        each = pending.pop()
        if isinstance(each, torch.Tensor):
            if is_fake(each):
                return True
            continue
        if isinstance(each, torch.SymInt | torch.SymFloat | torch.SymBool):
            return True
        if id(each) in seen:
            continue
        seen.add(id(each))
        enter = _way_into(each)
        if enter in (PythonState._object, PythonState._module, PythonState._own):
            pending += contents_of_object(each).values()
        elif enter is PythonState._iterator:
            pending += gc.get_referents(each)
        elif isinstance(each, dict):
            pending += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset | deque):
            pending += each
        elif isinstance(each, types.FunctionType):
            for cell in each.__closure__ or ():
                pending += contents_of_cell(cell).values()
        elif isinstance(each, types.MethodType):
            pending += [each.__self__, each.__func__]
        elif isinstance(each, functools.partial):
            pending += [each.func, each.args, each.keywords]
    return False
