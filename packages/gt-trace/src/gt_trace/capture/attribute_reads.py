"""Attributes that a step reads while it runs for its capture, recorded object by object.

Inside of ``AttributeReads.noted`` the classes of the objects have a ``__getattribute__`` that notes
each name. So it is known what was read, and of which object: by ``self.scale``, by ``getattr`` with
a name that is computed, by ``vars`` and ``dataclasses.asdict``, and by methods of libraries.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from gt_trace._torch_internals import around_compilations

ALL = "__dict__"
"""The name that is read by code which takes all attributes."""

_COPIED_BY = frozenset({"__getstate__", "__reduce__", "__reduce_ex__"})

_IS_HEAP, _IS_IMMUTABLE = 1 << 9, 1 << 8
"""Flags of classes. Source: ``Py_TPFLAGS_HEAPTYPE`` and ``Py_TPFLAGS_IMMUTABLETYPE`` of CPython."""

_LOOK_UP_ONE = frozenset({nn.Module.__getattr__.__code__.co_filename, functools.__file__})
"""Files whose code takes ``__dict__`` to look up one name: that of a module, and of
``functools.cached_property``."""


class _NotedClass:
    """A class whose reads are noted, by all captures that are under way in any thread."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.recorders: list[AttributeReads] = []
        self.found = kind.__getattribute__
        self._own = vars(kind).get("__getattribute__")
        self._noting = self._noting_function()

    def change(self) -> None:
        """Let the class note its reads.

        Raises:
            TypeError: it cannot be changed.
        """
        type.__setattr__(self.kind, "__getattribute__", self._noting)

    def put_back(self) -> None:
        """Let the class be as it was."""
        if vars(self.kind).get("__getattribute__") is not self._noting:
            return
        if self._own is None:
            type.__delattr__(self.kind, "__getattribute__")
        else:
            type.__setattr__(self.kind, "__getattribute__", self._own)

    def _noting_function(self) -> Any:
        kind, own, found, recorders = self.kind, self._own, self.found, self.recorders

        def noting(instance: Any, name: str) -> Any:
            if name != ALL or sys._getframe(1).f_code.co_filename not in _LOOK_UP_ONE:
                for each in recorders:
                    each.note(kind, instance, name)
            # Of another class, it may be another method that follows.
            if own is not None or type(instance) is kind:
                return found(instance, name)
            return super(kind, instance).__getattribute__(name)

        return noting


_NOTED: dict[int, _NotedClass] = {}
_LOCK = threading.RLock()
"""Held while classes are changed or put back."""


class AttributeReads:
    """Records reads of attributes inside of ``noted``.

    Nothing is recorded while Dynamo compiles, which reads the code of FlexAttention's functions
    instead of running it, and would read that of ``__getattribute__`` too.

    Args:
        objects: whose reads are noted, as far as their classes can be changed.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self._noted: defaultdict[int, set[str]] = defaultdict(set)
        self._noted_of: defaultdict[int, set[str]] = defaultdict(set)
        self._given: dict[int, Any] = {}
        for each in objects:
            kind: Any = type(each)
            if _can_change(kind):
                self._given.setdefault(id(kind), kind)
        self._classes: dict[int, _NotedClass] = {}

    def note(self, kind: Any, instance: Any, name: str) -> None:
        """Note a read of an attribute of an instance of ``kind``."""
        self._noted[id(instance)].add(name)
        self._noted_of[id(kind)].add(name)

    def of(self, target: Any) -> set[str] | None:
        """Return the names that were read of an object; None if its reads are not noted.

        ``ALL`` is among them where the object was copied, or if its class looks up names itself.
        """
        noted_class = self._classes.get(id(type(target)))
        if noted_class is None:
            return None
        noted = self._noted[id(target)]
        looks_up = isinstance(noted_class.found, types.FunctionType)
        return noted | {ALL} if looks_up or noted & _COPIED_BY else noted

    def of_instances(self, kind: type) -> set[str]:
        """Return the names that were read of instances of a class."""
        return set().union(
            *(
                self._noted_of[key]
                for key, each in self._classes.items()
                if kind in each.kind.__mro__
            )
        )

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what is read inside."""
        with _LOCK:
            for key, kind in self._given.items():
                noted_class = _NOTED.get(key) or _NotedClass(kind)
                try:
                    noted_class.change()
                except TypeError:  # a class of C++ does not let itself be changed
                    continue
                _NOTED[key] = self._classes[key] = noted_class
                noted_class.recorders.append(self)
        try:
            with around_compilations(self._put_back, self._change):
                yield
        finally:
            with _LOCK:
                for key, noted_class in self._classes.items():
                    noted_class.recorders.remove(self)
                    if not noted_class.recorders:
                        noted_class.put_back()
                        del _NOTED[key]

    def _change(self) -> None:
        with _LOCK:
            for each in self._classes.values():
                each.change()

    def _put_back(self) -> None:
        with _LOCK:
            for each in self._classes.values():
                each.put_back()


def _can_change(kind: Any) -> bool:
    return bool(kind.__flags__ & _IS_HEAP) and not kind.__flags__ & _IS_IMMUTABLE
