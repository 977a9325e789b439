"""Python objects that a step can reach: what they hold, read before and after the step ran.

A walk starts at the module, the step, the optimizer and the arguments. It follows attributes of
modules and plain objects, containers, hooks, closures, and the classes and globals of the code that
it meets. Each object that Python can change is a holder; its contents are copied one level deep.
PyTorch's own objects, those of the standard library and tensors are not entered.
"""

from __future__ import annotations

import enum
import functools
import gc
import operator
import sys
import types
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gt_trace._torch_internals import is_fake

_FOREIGN = frozenset({"torch", "numpy", *sys.builtin_module_names, *sys.stdlib_module_names})
_OWN = frozenset({"gt_config", "gt_trace", "gt_passes", "gt_pipeline", "gt_autoparallel"})
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes in which a module keeps the hooks of its calls."""

_STATE_OF_MODULES = frozenset(
    {"training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
)
_NO_STATE = frozenset({*vars(nn.Module()), *HOOKS, "_opt_called"} - _STATE_OF_MODULES)
"""Attributes that no replay needs. Hooks are compared by ``with_settled_hooks``."""

_OF_PARAMETERS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Attributes in which PyTorch's recurrent layers list their parameters at each call."""

_MOST_ENTERED = 10_000
"""Larger containers are compared, and what they hold is not entered."""

_SEQUENCES = (list, tuple, deque, frozenset)
_MOST_CLASSES = 4096
_MOST_DEPTH = 20
_MOST_SHOWN = 60
_HEAP_TYPE = 1 << 9
MISSING: Any = object()
"""Marks a place that holds nothing."""


def _contents_of_object(target: Any) -> dict[str, Any]:
    held: dict[str, Any] = dict(getattr(target, "__dict__", ()))
    for name in _slots_of(target):
        if (value := getattr(target, name, MISSING)) is not MISSING:
            held[name] = value
    return held


def _write_object(target: Any, contents: Mapping[str, Any]) -> None:
    own = getattr(target, "__dict__", {})
    slots = _slots_of(target)
    if own.keys() != contents.keys() - set(slots):
        own.clear()
    for name, value in contents.items():
        if name in slots:
            object.__setattr__(target, name, value)
        else:
            own[name] = value
    for name in slots:
        if name not in contents and hasattr(target, name):
            object.__delattr__(target, name)


def _write_mapping(target: dict[Any, Any], contents: Mapping[Any, Any]) -> None:
    kind: Any = OrderedDict if isinstance(target, OrderedDict) else dict
    kind.clear(target)
    for key, value in contents.items():
        kind.__setitem__(target, key, value)


def _contents_of_class(target: type) -> dict[str, Any]:
    return {key: value for key, value in vars(target).items() if not key.startswith("__")}


def _write_class(target: type, contents: Mapping[str, Any]) -> None:
    for key in _contents_of_class(target).keys() - contents.keys():
        delattr(target, key)
    for key, value in contents.items():
        if vars(target).get(key, MISSING) is not value:
            setattr(target, key, value)


def _contents_of_globals(target: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in target.items() if not key.startswith("__")}


def _write_globals(target: dict[str, Any], contents: Mapping[str, Any]) -> None:
    for key in _contents_of_globals(target).keys() - contents.keys():
        del target[key]
    target.update(contents)


def _contents_of_cell(target: types.CellType) -> dict[str, Any]:
    try:
        return {"": target.cell_contents}
    except ValueError:  # nothing was put in it yet
        return {}


def _write_cell(target: types.CellType, contents: Mapping[str, Any]) -> None:
    if contents:
        target.cell_contents = contents[""]
    else:
        del target.cell_contents


def _write_list(target: list[Any], contents: Mapping[Any, Any]) -> None:
    list.__setitem__(target, slice(None), contents.values())


def _refill(
    kind: Any, fill: Callable[[Any, Any], None]
) -> Callable[[Any, Mapping[Any, Any]], None]:
    def write(target: Any, contents: Mapping[Any, Any]) -> None:
        kind.clear(target)
        fill(target, contents.values())

    return write


def _numbered(target: Any) -> dict[Any, Any]:
    # Not by what a subclass makes of indexing, which may change the object.
    kind: Any = next(each for each in _SEQUENCES if isinstance(target, each))
    return dict(enumerate(kind.__iter__(target)))


def _contents_of_mapping(target: dict[Any, Any]) -> dict[Any, Any]:
    if isinstance(target, OrderedDict):
        return {key: dict.__getitem__(target, key) for key in OrderedDict.__iter__(target)}
    return dict(dict.items(target))


def _tensors_in_cache(target: Any) -> dict[Any, Any]:
    """Traced tensors that a function of ``functools.lru_cache`` stores."""
    held = gc.get_referents(target)
    held += [each for table in held if type(table) is dict for each in table.values()]
    return {id(each): each for each in held if isinstance(each, torch.Tensor) and is_fake(each)}


@dataclass(frozen=True, slots=True)
class _Kind:
    """How holders of one kind are read and written, and how a place in them is shown."""

    read: Callable[[Any], dict[Any, Any]]
    write: Callable[[Any, Mapping[Any, Any]], None]
    show: Callable[[Any], str]


_OBJECT = _Kind(_contents_of_object, _write_object, lambda key: f".{key}")
_MAPPING = _Kind(_contents_of_mapping, _write_mapping, lambda key: f"[{short(key)}]")
_LIST = _Kind(_numbered, _write_list, lambda key: f"[{key}]")
_DEQUE = _Kind(_numbered, _refill(deque, deque.extend), lambda key: f"[{key}]")
_SET = _Kind(
    lambda target: {id(each): each for each in target}, _refill(set, set.update), lambda _: "{}"
)
_NUMBERS = _Kind(
    lambda target: {
        key: each for key, each in target.items() if not isinstance(each, torch.Tensor)
    },
    lambda target, contents: target.update(contents),
    lambda key: f"[{key!r}]",
)
_CACHE = _Kind(_tensors_in_cache, lambda target, _: target.cache_clear(), lambda _: "")
_CELL = _Kind(_contents_of_cell, _write_cell, lambda _: "")
_CLASS = _Kind(_contents_of_class, _write_class, lambda key: f".{key}")
_GLOBALS = _Kind(_contents_of_globals, _write_globals, lambda key: f".{key}")


@dataclass(slots=True)
class Holder:
    """An object that Python can change, with its contents at the time of the walk."""

    kind: _Kind
    target: Any
    before: dict[Any, Any]
    parent: Holder | str
    key: Any

    @property
    def path(self) -> str:
        """How a program reaches the object."""
        if isinstance(self.parent, str):
            return self.parent
        return self.parent.place(self.key)

    def place(self, key: Any) -> str:
        """How a program reaches what the object holds at ``key``."""
        if self.kind is _OBJECT and key in ("_modules", "_parameters", "_buffers"):
            return self.path
        is_table = not isinstance(self.parent, str) and self.parent.kind is _OBJECT
        if is_table and self.key in ("_modules", "_parameters", "_buffers"):
            return f"{self.path}.{key}"
        return self.path + self.kind.show(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One place that holds something else than before."""

    holder: Holder
    key: Any
    before: Any
    after: Any


class PythonState:
    """Contents of the objects that are reached from ``roots``, as they are now.

    Args:
        roots: objects, by how a message names them.
        optimizer: its tensors are left out, since they are part of the state of the step.
    """

    def __init__(
        self, roots: Mapping[str, object], *, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self._holders: list[Holder] = []
        self._seen: set[int] = set()
        self._optimizer = optimizer
        self._found: list[tuple[Holder, dict[Any, Any]]] | None = None
        # Everything entered is kept, so that no id is used twice.
        self._kept: list[Any] = []
        self._entered_modules: set[tuple[int, frozenset[str]]] = set()
        self._pending: list[tuple[Any, Holder | str, Any]] = []
        self._code: list[Callable[[], None]] = []
        for label, value in roots.items():
            self._enter(value, label, None)
            # First what is reached by attributes, so that places have their usual names.
            while self._pending:
                self._enter(*self._pending.pop())
        while self._code:
            self._code.pop()()
            while self._pending:
                self._enter(*self._pending.pop())

    def changes(self) -> list[Change]:
        """Return what is different now, except values that equal those before."""
        found: list[Change] = []
        self._found = list(self._changed())
        for holder, after in self._found:
            before = holder.before
            for key in {**before, **after}:
                old, new = before.get(key, MISSING), after.get(key, MISSING)
                if old is not new and key not in _NO_STATE | _OF_PARAMETERS and not _same(old, new):
                    found.append(Change(holder=holder, key=key, before=old, after=new))
        return found

    def restore(self) -> list[tuple[Holder, dict[Any, Any]]]:
        """Let every object hold what it held; return what objects held that have changed.

        Nothing may have changed since ``changes`` was called.
        """
        changed = list(self._changed()) if self._found is None else self._found
        for holder, _ in changed:
            holder.kind.write(holder.target, holder.before)
        return changed

    def _changed(self) -> Iterator[tuple[Holder, dict[Any, Any]]]:
        for holder in self._holders:
            before, after = holder.before, holder.kind.read(holder.target)
            same_places = len(before) == len(after) and all(map(operator.eq, before, after))
            if not (same_places and all(map(operator.is_, before.values(), after.values()))):
                if holder.kind is _OBJECT:  # hooks are no change
                    apart = {key: after[key] for key in after if key in _NO_STATE}
                    holder.before.update(apart)
                yield holder, after

    def _hold(self, kind: _Kind, target: Any, parent: Holder | str, key: Any) -> Holder:
        holder = Holder(kind, target, kind.read(target), parent, key)
        self._holders.append(holder)
        return holder

    def _enter(self, value: Any, parent: Holder | str, key: Any) -> None:
        how = _way_into(value)
        if how is None or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        how(self, value, parent, key)

    def _push(self, holder: Holder, values: Mapping[Any, Any] | None = None) -> None:
        held = holder.before if values is None else values
        if len(held) <= _MOST_ENTERED:
            self._pending += [
                (value, holder, key) for key, value in held.items() if _way_into(value) is not None
            ]

    def _object(self, value: Any, parent: Holder | str, key: Any) -> None:
        self._push(self._hold(_OBJECT, value, parent, key))
        self._code.append(lambda: self._classes(type(value)))

    def _module(self, value: nn.Module, parent: Holder | str, key: Any) -> None:
        holder = self._hold(_OBJECT, value, parent, key)
        held = holder.before.items()
        self._push(holder, {key: each for key, each in held if key not in _NO_STATE})
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
        holder = self._hold(_OBJECT, value, parent, key)
        self._push(holder, {key: each for key, each in holder.before.items() if key != "state"})
        for parameter, state in self._optimizer.state.items():
            if isinstance(state, dict):
                name = f"{holder.path}.state[a parameter of shape {list(parameter.shape)}]"
                self._hold(_NUMBERS, state, name, None)

    def _mapping(self, value: Any, parent: Holder | str, key: Any) -> None:
        self._push(self._hold(_MAPPING, value, parent, key))
        if getattr(value, "__dict__", None):
            self._push(self._hold(_OBJECT, value, parent, key))

    def _list(self, value: Any, parent: Holder | str, key: Any) -> None:
        self._push(self._hold(_LIST, value, parent, key))

    def _deque(self, value: Any, parent: Holder | str, key: Any) -> None:
        self._push(self._hold(_DEQUE, value, parent, key))

    def _set(self, value: Any, parent: Holder | str, key: Any) -> None:
        self._push(self._hold(_SET, value, parent, key))

    def _fixed(self, value: Any, parent: Holder | str, key: Any) -> None:
        self._push(Holder(_LIST, value, _numbered(value), parent, key))

    def _partial(self, value: Any, parent: Holder | str, key: Any) -> None:
        self._pending += [(each, parent, key) for each in (value.func, value.args, value.keywords)]

    def _method(self, value: Any, parent: Holder | str, key: Any) -> None:
        self._pending += [(value.__self__, parent, key), (value.__func__, parent, key)]

    def _cached(self, value: Any, parent: Holder | str, key: Any) -> None:
        self._pending.append((value.__wrapped__, parent, key))
        self._hold(_CACHE, value, f"the cache of {value.__qualname__}", None)

    def _own(self, value: Any, parent: Holder | str, key: Any) -> None:
        """Enter the modules and functions of an object of this project; its state is no user's."""
        self._pending += [
            (each, parent, key)
            for each in _contents_of_object(value).values()
            if isinstance(each, nn.Module | types.FunctionType | types.MethodType)
        ]

    def _function(self, value: Any, parent: Holder | str, key: Any) -> None:
        self._code.append(lambda: self._enter_function(value, parent, key))

    def _enter_function(self, value: Any, parent: Holder | str, key: Any) -> None:
        package = _package(value.__globals__.get("__name__"))
        if package in _FOREIGN:
            return
        cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        if package in _OWN:
            for cell in cells.values():
                self._pending += [
                    (each, parent, key)
                    for each in _contents_of_cell(cell).values()
                    if not isinstance(each, dict | list | set | deque)
                ]
            return
        for name, cell in cells.items():
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                self._kept.append(cell)
                self._push(self._hold(_CELL, cell, f"{name} (of {value.__qualname__})", None))
        if value.__dict__ or isinstance(parent, str):
            self._push(self._hold(_OBJECT, value, value.__qualname__, None))
        for each in (value.__defaults__, value.__kwdefaults__):
            self._pending.append((each, f"a default of {value.__qualname__}", None))
        self._globals(value.__globals__, _names(value.__code__))

    def _globals(self, held: dict[str, Any], names: frozenset[str]) -> None:
        module = str(held.get("__name__", "executed code"))
        if _package(module) in _FOREIGN | _OWN:
            return
        if id(held) not in self._seen:
            self._seen.add(id(held))
            self._hold(_GLOBALS, held, module, None)
        for name in names & held.keys():
            value = held[name]
            if isinstance(value, types.ModuleType):
                self._python_module(value, names)
            else:
                self._pending.append((value, f"{module}.{name}", None))

    def _python_module(self, module: types.ModuleType, names: frozenset[str]) -> None:
        key = id(module), names
        if key not in self._entered_modules:
            self._entered_modules.add(key)
            self._globals(vars(module), names)

    def _classes(self, kind: type) -> None:
        for each in kind.__mro__:
            if id(each) in self._seen or _package(each.__module__) in _FOREIGN | _OWN:
                continue
            self._seen.add(id(each))
            self._push(self._hold(_CLASS, each, each.__qualname__, None))


_Enter = Callable[[PythonState, Any, Any, Any], None]


@functools.lru_cache(maxsize=_MOST_CLASSES)
def _how_entered(kind: Any) -> _Enter | None:
    """Return the method that enters an object of that class; None if none is entered."""
    for base, enter in _ENTERED.items():
        if issubclass(kind, base):
            return enter
    package = _package(kind.__module__)
    if package in _OWN:
        return PythonState._own
    is_plain = all(base is object or base.__flags__ & _HEAP_TYPE for base in kind.__mro__)
    return PythonState._object if is_plain and package not in _FOREIGN else None


_ENTERED: dict[type, _Enter | None] = {
    torch.Tensor: None,
    type: None,
    nn.Module: PythonState._module,
    torch.optim.Optimizer: PythonState._optimizer_object,
    torch.optim.lr_scheduler.LRScheduler: PythonState._object,
    torch.amp.GradScaler: PythonState._object,
    dict: PythonState._mapping,
    list: PythonState._list,
    deque: PythonState._deque,
    set: PythonState._set,
    tuple: PythonState._fixed,
    frozenset: PythonState._fixed,
    enum.Enum: None,
    types.SimpleNamespace: PythonState._object,
    UserDict: PythonState._object,
    UserList: PythonState._object,
    functools.partial: PythonState._partial,
    types.FunctionType: PythonState._function,
    types.MethodType: PythonState._method,
    functools._lru_cache_wrapper: PythonState._cached,
}


def _way_into(value: Any) -> _Enter | None:
    kind: Any = type(value)
    return _how_entered(kind)


def _slots_of(target: Any) -> tuple[str, ...]:
    kind: Any = type(target)
    return _slots(kind)


def _package(module: object) -> str:
    return str(module).partition(".")[0]


@functools.lru_cache(maxsize=_MOST_CLASSES)
def _slots(kind: Any) -> tuple[str, ...]:
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        names.extend((slots,) if isinstance(slots, str) else slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _names(code: types.CodeType) -> frozenset[str]:
    """Names of globals and attributes that code reads or writes, in functions inside of it too."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return frozenset(names)


_BY_VALUE = (
    *(bool, int, float, complex, str, bytes, type(None), range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def _same(old: Any, new: Any, depth: int = 0) -> bool:
    """Whether two values are equal in everything except their identity."""
    if old is new:
        return True
    if type(old) is not type(new) or depth > _MOST_DEPTH:
        return False
    if isinstance(old, _BY_VALUE):
        return repr(old) == repr(new)
    if isinstance(old, set | frozenset):
        return bool(old == new)
    if isinstance(old, types.MethodType):
        return old.__func__ is new.__func__ and old.__self__ is new.__self__
    enter = _way_into(old)
    if enter is PythonState._mapping:
        one, other = _contents_of_mapping(old), _contents_of_mapping(new)
    elif enter in (PythonState._list, PythonState._fixed, PythonState._deque):
        one, other = _numbered(old), _numbered(new)
    elif enter is PythonState._object:
        one, other = _contents_of_object(old), _contents_of_object(new)
    else:
        return False
    return list(one) == list(other) and all(
        _same(value, other[key], depth + 1) for key, value in one.items()
    )


def short(value: object) -> str:
    """Return how a message shows a value."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


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
            pending += _contents_of_object(each).values()
        elif isinstance(each, dict):
            pending += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset | deque):
            pending += each
        elif isinstance(each, types.FunctionType):
            for cell in each.__closure__ or ():
                pending += _contents_of_cell(cell).values()
        elif isinstance(each, types.MethodType):
            pending += [each.__self__, each.__func__]
        elif isinstance(each, functools.partial):
            pending += [each.func, each.args, each.keywords]
    return False
