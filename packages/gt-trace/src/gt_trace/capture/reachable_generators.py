"""Random number generators that a step can reach: ambient ones, and objects that its code reads.

The walk follows closures, defaults, global names and attributes, from the step and its model. A
generator that is made inside of the step, or reached in another way, is not found.
"""

from __future__ import annotations

import functools
import pickle
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from gt_trace._torch_internals import generator_address
from gt_trace.capture.stack_traces import is_of_user

_MOST_OBJECTS = 20_000
_MOST_ITEMS = 1_000
"""Longer containers are data."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = frozenset(
    {int, float, str, bool, bytes, type(None), torch.Tensor, nn.Parameter, torch.dtype}
)
_FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "numpy", "gt_trace"}) - {"__main__"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldGenerator:
    """A generator of PyTorch, Python or NumPy, and its name in messages."""

    name: str
    generator: Any

    @property
    def key(self) -> int:
        """A number that every Python object for the same generator has."""
        held = self.generator
        return generator_address(held) if isinstance(held, torch.Generator) else id(held)

    @property
    def state(self) -> Any:
        """A copy of the state: a tensor, a tuple or bytes."""
        held = self.generator
        if isinstance(held, torch.Generator):
            return held.get_state()
        if isinstance(held, random.Random):
            return held.getstate()
        return pickle.dumps(_numpy_state_of(held))

    def restore(self, state: Any) -> None:
        """Set the state that ``state`` had returned."""
        held = self.generator
        if isinstance(held, torch.Generator):
            held.set_state(state)
        elif isinstance(held, random.Random):
            held.setstate(state)
        elif hasattr(held, "set_state"):
            held.set_state(pickle.loads(state))
        else:
            getattr(held, "bit_generator", held).state = pickle.loads(state)

    def advance(self) -> None:
        """Move to another state, as a draw does."""
        held = self.generator
        if not isinstance(held, torch.Generator):
            draw = getattr(held, "random", None) or held.random_raw
            draw()
        elif held.device.type == "cpu":
            torch.empty(1, device="cpu").uniform_(generator=held)
        else:  # a counter: no kernel runs
            held.set_offset(held.get_offset() + 4)


def reachable_generators(*roots: object) -> list[HeldGenerator]:
    """Return the ambient generators, and those that ``roots`` (functions, models) can reach."""
    found: dict[int, HeldGenerator] = {}
    for held in (*_ambient(), *_Walk(roots).generators()):
        found.setdefault(held.key, held)
    return list(found.values())


def _ambient() -> Iterator[HeldGenerator]:
    yield HeldGenerator(name="PyTorch's generator", generator=torch.default_generator)
    for backend in (torch.cuda, torch.xpu):
        if backend.is_initialized():
            for generator in backend.default_generators:
                name = f"PyTorch's generator of {generator.device}"
                yield HeldGenerator(name=name, generator=generator)
    python: Any = random.getstate
    yield HeldGenerator(name="Python's generator (random)", generator=python.__self__)
    if numpy := sys.modules.get("numpy"):
        name = "NumPy's generator (numpy.random)"
        yield HeldGenerator(name=name, generator=numpy.random.get_state.__self__)


def _numpy_state_of(generator: Any) -> Any:
    if hasattr(generator, "get_state"):
        return generator.get_state(legacy=False)
    return getattr(generator, "bit_generator", generator).state


@functools.cache
def _kinds(_has_numpy: bool) -> tuple[type, ...]:
    kinds: list[type] = [torch.Generator, random.Random]
    if numpy := sys.modules.get("numpy"):
        names = ("Generator", "RandomState", "BitGenerator")
        kinds += [getattr(numpy.random, name) for name in names]
    return tuple(kinds)


class _Walk:
    """A search through objects, each visited once.

    A method is visited if visited code has its name, since a class has many that no step calls.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self._pending: list[tuple[str, object]] = [("", root) for root in roots]
        self._seen: dict[int, object] = {}
        self._kinds = _kinds("numpy" in sys.modules)
        self._called = {"forward", "__call__", "__init__"}
        self._methods: dict[str, list[object]] = {}

    def generators(self) -> Iterator[HeldGenerator]:
        """Search, and yield what is found."""
        seen, kinds = self._seen, self._kinds
        while self._pending and len(seen) < _MOST_OBJECTS:
            name, value = self._pending.pop()
            if type(value) in _PLAIN or id(value) in seen:
                continue
            seen[id(value)] = value
            if isinstance(value, kinds):
                if not isinstance(value, random.SystemRandom):
                    yield HeldGenerator(name=f"the generator {name}", generator=value)
                continue
            self._pending += self._inside(name, value)

    def _inside(self, name: str, value: Any) -> Iterable[tuple[str, object]]:
        if isinstance(value, FunctionType):
            return self._read_by(value) if is_of_user(value.__code__) else ()
        if isinstance(value, MethodType):
            return (("", value.__func__), (name, value.__self__))
        if isinstance(value, staticmethod | classmethod):
            return ((name, value.__func__),)
        if isinstance(value, property):
            return ((name, value.fget),)
        if isinstance(value, functools.partial):
            return ((name, each) for each in (value.func, *value.args, *value.keywords.values()))
        if isinstance(value, dict):
            pairs = value.items() if len(value) <= _MOST_ITEMS else ()
            return ((f"{name}[{key!r}]", each) for key, each in pairs)
        if isinstance(value, list | tuple | set | frozenset):
            items = value if len(value) <= _MOST_ITEMS else ()
            return ((f"{name}[{index}]", each) for index, each in enumerate(items))
        if isinstance(value, nn.Module):
            return _in_model(name, value)
        if isinstance(value, ModuleType) or _is_foreign(
            value if isinstance(value, type) else type(value)
        ):
            return ()
        if isinstance(value, type):
            return self._in_class(value)
        return _attributes(name, value)

    def _read_by(self, function: FunctionType) -> Iterator[tuple[str, object]]:
        """Yield the objects outside of a function that its code names."""
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            try:
                yield name, cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            yield f"of {function.__name__}'s defaults", value
        yield from ((function.__name__, each) for each in vars(function).values())
        names = list(_names(function.__code__))
        for name in names:
            if name not in self._called:
                self._called.add(name)
                yield from ((name, each) for each in self._methods.pop(name, ()))
            value = function.__globals__.get(name)
            yield name, value
            if isinstance(value, ModuleType) and not _is_foreign(value):
                held = vars(value)
                yield from ((f"{name}.{each}", held[each]) for each in names if each in held)

    def _in_class(self, kind: type) -> Iterator[tuple[str, object]]:
        yield from (("", base) for base in kind.__bases__)
        for key, value in list(vars(kind).items()):
            is_code = isinstance(value, FunctionType | staticmethod | classmethod | property)
            if is_code and key not in self._called:
                self._methods.setdefault(key, []).append(value)
            elif not isinstance(value, type):
                yield f"{kind.__name__}.{key}", value


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _in_model(name: str, model: nn.Module) -> Iterator[tuple[str, object]]:
    for key, each in vars(model).items():
        if key not in _OF_EVERY_MODULE:
            yield f"{name}.{key}".lstrip("."), each
    for key, each in model._modules.items():
        yield f"{name}.{key}".lstrip("."), each
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        yield from (("", hook) for hook in hooks.values())
    yield "", type(model)


def _attributes(name: str, value: object) -> Iterator[tuple[str, object]]:
    yield "", type(value)
    for key, each in list(getattr(value, "__dict__", {}).items()):
        yield f"{name}.{key}".lstrip("."), each
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for key in (slots,) if isinstance(slots, str) else slots:
            yield f"{name}.{key}", getattr(value, key, None)


def _is_foreign(value: type | ModuleType) -> bool:
    """Whether it is part of Python, PyTorch, NumPy or this package."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return str(name).partition(".")[0] in _FOREIGN
