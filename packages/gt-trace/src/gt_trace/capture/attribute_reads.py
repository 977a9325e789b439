"""Attributes that a step reads while it runs for its capture, recorded object by object.

Inside of ``AttributeReads`` the classes of the objects have a ``__getattribute__`` that notes each
name. So it is known what was read, and of which object: by ``self.scale``, by ``getattr`` with a
name that is computed, by ``vars`` and ``dataclasses.asdict``, and by methods of libraries.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import defaultdict
from collections.abc import Iterable
from types import TracebackType
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


class AttributeReads:
    """Inside, reads of attributes are noted.

    Not while Dynamo compiles, which reads the code of FlexAttention's functions instead of running
    it, and would read that of ``__getattribute__`` too.

    Args:
        objects: whose reads are noted, as far as their classes can be changed.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self._noted: defaultdict[int, set[str]] = defaultdict(set)
        kinds: dict[int, Any] = {}
        for each in objects:
            kind: Any = type(each)
            if _can_change(kind):
                kinds.setdefault(id(kind), kind)
        self._kinds = kinds
        self._noted_of: dict[int, set[str]] = {key: set() for key in kinds}
        self._own = {key: vars(kind).get("__getattribute__") for key, kind in kinds.items()}
        self._found = {key: kind.__getattribute__ for key, kind in kinds.items()}
        self._noting = {
            key: self._noting_of(kind, self._own[key], self._found[key], self._noted_of[key])
            for key, kind in kinds.items()
        }
        self._compilations = around_compilations(self._put_back, self._change)

    def of(self, target: Any) -> set[str] | None:
        """Return the names that were read of an object; None if its reads are not noted.

        ``ALL`` is among them where the object was copied, or if its class looks up names itself.
        """
        key = id(type(target))
        if key not in self._kinds:
            return None
        noted = self._noted[id(target)]
        looks_up = isinstance(self._found[key], types.FunctionType)
        return noted | {ALL} if looks_up or noted & _COPIED_BY else noted

    def of_instances(self, kind: type) -> set[str]:
        """Return the names that were read of instances of a class."""
        return set().union(
            *(self._noted_of[key] for key, each in self._kinds.items() if kind in each.__mro__)
        )

    def __enter__(self) -> AttributeReads:
        self._compilations.__enter__()
        self._change()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._put_back()
        self._compilations.__exit__(kind, value, trace)

    def _change(self) -> None:
        for key, kind in self._kinds.items():
            type.__setattr__(kind, "__getattribute__", self._noting[key])

    def _put_back(self) -> None:
        for key, kind in self._kinds.items():
            if self._own[key] is not None:
                type.__setattr__(kind, "__getattribute__", self._own[key])
            elif "__getattribute__" in vars(kind):
                type.__delattr__(kind, "__getattribute__")

    def _noting_of(self, kind: Any, own: Any, found: Any, of_kind: set[str]) -> Any:
        noted = self._noted

        def noting(instance: Any, name: str) -> Any:
            if name != ALL or sys._getframe(1).f_code.co_filename not in _LOOK_UP_ONE:
                noted[id(instance)].add(name)
                of_kind.add(name)
            # Of another class, it may be another method that follows.
            if own is not None or type(instance) is kind:
                return found(instance, name)
            return super(kind, instance).__getattribute__(name)

        return noting


def _can_change(kind: Any) -> bool:
    return bool(kind.__flags__ & _IS_HEAP) and not kind.__flags__ & _IS_IMMUTABLE
