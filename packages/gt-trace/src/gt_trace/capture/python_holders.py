"""Objects that Python can change: how the contents of each kind are read, compared and written."""

from __future__ import annotations

import array
import contextvars
import copy
import ctypes
import functools
import gc
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gt_trace._torch_internals import is_fake

_SEQUENCES = (list, tuple, deque, frozenset)
_MOST_CLASSES = 4096
_MOST_SHOWN = 60
_MOST_BYTES = 1 << 20
"""Larger arrays are not compared."""

_PLAIN = (bool, int, float, complex, str, type(None))
MISSING: Any = object()
"""Marks a place that holds nothing."""

ORDER: Any = object()
"""Marks a change of the order of a dictionary."""


C_DATA: Any = ctypes.c_int.__mro__[-2]
"""The class of numbers, arrays and structures of ``ctypes``."""


def contents_of_object(target: Any) -> dict[str, Any]:
    """Return attributes and slots."""
    held: dict[str, Any] = dict(getattr(target, "__dict__", ()))
    for name in slots_of(target):
        if (value := getattr(target, name, MISSING)) is not MISSING:
            held[name] = value
    return held


def _write_object(target: Any, contents: Mapping[str, Any]) -> None:
    own = getattr(target, "__dict__", {})
    slots = slots_of(target)
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
    """Return attributes and methods, without ``__getattribute__``: ``AttributeReads`` sets it."""
    return {
        key: value
        for key, value in vars(target).items()
        if not key.startswith("__")
        or (isinstance(value, types.FunctionType) and key != "__getattribute__")
    }


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


def contents_of_cell(target: types.CellType) -> dict[str, Any]:
    """Return the value of a closure's variable, if it has one."""
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


def numbered(target: Any) -> dict[Any, Any]:
    """Return the items of a sequence by their numbers."""
    # Not by what a subclass makes of indexing, which may change the object.
    kind: Any = next(each for each in _SEQUENCES if isinstance(target, each))
    items = kind.__iter__(target)
    if kind is frozenset and all(type(each) is str for each in target):
        items = iter(sorted(target))  # each process has another order of texts
    return dict(enumerate(items))


def keys_of_mapping(target: dict[Any, Any]) -> Iterator[Any]:
    """Yield the keys of a dictionary, without calling what a subclass overrides."""
    return (OrderedDict if isinstance(target, OrderedDict) else dict).__iter__(target)


def _contents_of_mapping(target: dict[Any, Any]) -> dict[Any, Any]:
    return {key: dict.__getitem__(target, key) for key in keys_of_mapping(target)}


def results_in_cache(target: Any) -> list[Any]:
    """Return the results that a function of ``functools.lru_cache`` stores."""
    held = [each for each in gc.get_referents(target) if each is not vars(target)]
    tables = [each for each in held if type(each) is dict]
    stored = [each for table in tables for each in table.values()]
    return stored + [each for each in held if type(each) is not dict]


def _contents_of_cache(target: Any) -> dict[Any, Any]:
    """Return traced tensors, and results that Python can change."""
    return {
        id(each): each
        for each in results_in_cache(target)
        if isinstance(each, list | dict | set | deque) or _is_traced(each)
    }


def _write_cache(target: Any, contents: Mapping[Any, Any]) -> None:
    if any(map(_is_traced, _contents_of_cache(target).values())):
        target.cache_clear()


def _is_traced(value: object) -> bool:
    return isinstance(value, torch.Tensor) and is_fake(value)


def _contents_of_iterator(target: Any) -> dict[Any, Any]:
    """Return the position: what pickling stores, or what a generator holds."""
    try:
        with warnings.catch_warnings():  # itertools will have no pickling
            warnings.simplefilter("ignore", DeprecationWarning)
            return {"": target.__reduce__()}
    except TypeError:
        frame = getattr(target, "gi_frame", None)
        return {"": [repr(target), frame and frame.f_lasti, *gc.get_referents(target)]}


def _write_iterator(target: Any, contents: Mapping[Any, Any]) -> None:
    state = contents[""][2:3]
    if isinstance(contents[""], tuple) and state and hasattr(target, "__setstate__"):
        target.__setstate__(*state)


def _contents_of_buffer(target: Any) -> dict[Any, Any]:
    size = len(target) if isinstance(target, bytearray) else memoryview(target).nbytes
    if size > _MOST_BYTES:
        return {}
    try:
        return {"": copy.copy(target)}
    except ValueError:  # C data with pointers
        return {"": bytes(target)}


def _write_buffer(target: Any, contents: Mapping[Any, Any]) -> None:
    places = slice(None) if isinstance(target, bytearray | array.array) else ...
    for saved in contents.values():
        if isinstance(target, C_DATA):
            ctypes.memmove(ctypes.addressof(target), bytes(saved), ctypes.sizeof(target))
        else:
            target[places] = saved


def _contents_of_variable(target: contextvars.ContextVar[Any]) -> dict[Any, Any]:
    try:
        return {"": target.get()}
    except LookupError:  # nothing was put in it yet
        return {}


def _write_environment(target: Any, contents: Mapping[str, str]) -> None:
    for key in target.keys() - contents.keys():
        del target[key]
    target.update(contents)


@dataclass(frozen=True, slots=True)
class Kind:
    """How holders of one kind are read and written, and how a place in them is shown."""

    read: Callable[[Any], dict[Any, Any]]
    write: Callable[[Any, Mapping[Any, Any]], None]
    show: Callable[[Any], str]
    copies: bool = False
    """Whether what is read is made at each reading, so that its identity says nothing."""


OBJECT = Kind(contents_of_object, _write_object, lambda key: f".{key}")
MAPPING = Kind(_contents_of_mapping, _write_mapping, lambda key: f"[{short(key)}]")
LIST = Kind(numbered, _write_list, lambda key: f"[{key}]")
DEQUE = Kind(numbered, _refill(deque, deque.extend), lambda key: f"[{key}]")
SET = Kind(
    lambda target: {id(each): each for each in target}, _refill(set, set.update), lambda _: "{}"
)
NUMBERS = Kind(
    lambda target: {
        key: each for key, each in target.items() if not isinstance(each, torch.Tensor)
    },
    lambda target, contents: target.update(contents),
    lambda key: f"[{key!r}]",
)
CACHE = Kind(_contents_of_cache, _write_cache, lambda _: "")
CELL = Kind(contents_of_cell, _write_cell, lambda _: "")
CLASS = Kind(_contents_of_class, _write_class, lambda key: f".{key}")
GLOBALS = Kind(_contents_of_globals, _write_globals, lambda key: f".{key}")
ITERATOR = Kind(_contents_of_iterator, _write_iterator, lambda _: "", copies=True)
BUFFER = Kind(_contents_of_buffer, _write_buffer, lambda _: "", copies=True)
VARIABLE = Kind(_contents_of_variable, lambda target, held: target.set(held.get("")), lambda _: "")
ENVIRONMENT = Kind(dict, _write_environment, lambda key: f"[{key!r}]", copies=True)


def named_values(names: frozenset[str]) -> Kind:
    """Return the kind of a library's module, of which user code mentions these names."""

    def read(target: types.ModuleType) -> dict[str, Any]:
        held = vars(target)
        return {name: held[name] for name in names & held.keys() if type(held[name]) in _PLAIN}

    def write(target: types.ModuleType, contents: Mapping[str, Any]) -> None:
        for name in read(target).keys() - contents.keys():
            delattr(target, name)
        vars(target).update(contents)

    return Kind(read, write, lambda key: f".{key}")


@dataclass(slots=True)
class Holder:
    """An object that Python can change, with its contents at the time of the walk."""

    kind: Kind
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
        if key is ORDER:
            return f"the order of {self.path}"
        if self.kind is OBJECT and key in ("_modules", "_parameters", "_buffers"):
            return self.path
        is_table = not isinstance(self.parent, str) and self.parent.kind is OBJECT
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


def slots_of(target: Any) -> tuple[str, ...]:
    """Return the names of the slots of an object's class; what a function consists of."""
    kind: Any = type(target)
    return _slots(kind)


@functools.lru_cache(maxsize=_MOST_CLASSES)
def _slots(kind: Any) -> tuple[str, ...]:
    if kind is types.FunctionType:
        return ("__code__", "__defaults__", "__kwdefaults__")
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if is_private else name)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def short(value: object) -> str:
    """Return how a message shows a value."""
    if isinstance(value, weakref.ref):
        value = value()
    elif isinstance(value, C_DATA) and not hasattr(value, "value"):
        value = [*value] if isinstance(value, ctypes.Array) else bytes(value)
    return short_text(repr(value))


def short_text(text: str) -> str:
    """Return as much of a text as a message shows."""
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."
