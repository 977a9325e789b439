"""Annotations put on while the step runs, so that the traced nodes carry them.

A method is wrapped in the class, and the wrapper annotates the calls on annotated instances alone.
Nothing is stored on an instance, so that a copy of one runs its own method. The handle that comes
back takes the wrappers off again. Outside a trace the wrappers change nothing.
Source of the mechanism: ``torch.fx.traceback.annotate``.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, TracebackType
from typing import Any, Self

import torch.fx.traceback as fx_traceback
from torch import nn

from gt_config.node_keys import ModuleAnnotation, NodeAnnotation, Phase, PhaseAnnotation

REPLACED = "_gt_replaced"
"""Attribute of a function that an instance or a class has while a step is captured, and not
afterwards: what was in its place, in a tuple; an empty one for nothing."""


@contextmanager
def annotate(annotation: NodeAnnotation) -> Iterator[None]:
    """Nodes traced inside carry ``annotation``; inner contexts win over outer ones."""
    with fx_traceback.annotate(dict(annotation.to_meta())):
        yield


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """Nodes traced inside belong to that phase of the step (those of a backward: to backward)."""
    with annotate(PhaseAnnotation(phase=name)):
        yield


class AnnotationHandle:
    """Takes wrappers off again. Also a context manager that does so on exit."""

    def __init__(self, undo: list[Callable[[], None]]) -> None:
        self._undo = undo

    def undo(self) -> None:
        """Put the wrapped methods back as they were. Calling it twice is harmless."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()


class _OwnMethod:
    """An annotated attribute of one instance, as a patched ``forward``."""

    def __init__(self, original: Callable[..., Any], meta: dict[str, Any]) -> None:
        functools.update_wrapper(self, original)
        vars(self)[REPLACED] = (original,)
        self._original = original
        self._meta = meta

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with fx_traceback.annotate(self._meta):
            return self._original(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._original, memo)


class _ClassMethod:
    """A method of a class, wrapped while some instances of the class are annotated."""

    def __init__(self, owner: type, method: str, original: FunctionType) -> None:
        self._owner = owner
        self._method = method
        self._own = vars(owner).get(method)
        self._metas: dict[int, list[dict[str, Any]]] = {}
        metas = self._metas

        @functools.wraps(original)
        def annotated(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = metas.get(id(self))
            if found is None:
                return original(self, *args, **kwargs)
            meta = found[0] if len(found) == 1 else dict(item for m in found for item in m.items())
            with fx_traceback.annotate(meta):
                return original(self, *args, **kwargs)

        vars(annotated)[REPLACED] = () if self._own is None else (self._own,)
        self._wrapper = annotated
        setattr(owner, method, annotated)

    @classmethod
    def of(cls, instance: object, method: str) -> _ClassMethod | None:
        """Return the wrapped method; None if the instance does not have it from its class."""
        owner = type(instance)
        found = inspect.getattr_static(owner, method, None)
        if method in getattr(instance, "__dict__", ()) or not isinstance(found, FunctionType):
            return None
        known = _WRAPPED.get((owner, method))
        if known is None:
            known = _WRAPPED[owner, method] = cls(owner, method, found)
        return known

    def add(self, instance: object, meta: dict[str, Any]) -> Callable[[], None]:
        """Annotate the calls on one instance, and return what undoes it."""
        # The first one that was put on is the innermost, and wins.
        self._metas.setdefault(id(instance), []).insert(0, meta)

        def undo() -> None:
            held = self._metas[id(instance)]
            is_on_top = vars(self._owner).get(self._method) is self._wrapper
            if held[0] is not meta or not is_on_top:
                raise _wrapped_again(instance, self._method)
            del held[0]
            if not held:
                del self._metas[id(instance)]
            if not self._metas:
                del _WRAPPED[self._owner, self._method]
                if self._own is None:
                    delattr(self._owner, self._method)
                else:
                    setattr(self._owner, self._method, self._own)

        return undo


_WRAPPED: dict[tuple[type, str], _ClassMethod] = {}


def _wrapped_again(instance: object, method: str) -> RuntimeError:
    return RuntimeError(
        f"{type(instance).__name__}.{method} was wrapped again after it was annotated; undo the "
        "later wrapper first"
    )


def annotate_method(instance: object, method: str, annotation: NodeAnnotation) -> AnnotationHandle:
    """Annotate what one method of one object traces.

    Args:
        instance: any object, usually an ``nn.Module``.
        method: name of a method of it.
        annotation: what the nodes traced inside the method shall carry.

    Returns:
        The handle that undoes it. Undo in the reverse order of wrapping.

    Raises:
        AttributeError: the object has no such method; the message lists those it has.
    """
    original = getattr(instance, method, None)
    if not callable(original):
        known = sorted(
            name
            for name in dir(type(instance))
            if not name.startswith("__") and callable(getattr(type(instance), name, None))
        )
        raise AttributeError(
            f"{type(instance).__name__} has no method {method!r} to annotate; it has {known}"
        )
    meta = dict(annotation.to_meta())
    of_class = _ClassMethod.of(instance, method)
    if of_class is not None:
        return AnnotationHandle([of_class.add(instance, meta)])
    annotated = _OwnMethod(original, meta)
    had_own = method in vars(instance)
    object.__setattr__(instance, method, annotated)

    def undo() -> None:
        if vars(instance).get(method) is not annotated:
            raise _wrapped_again(instance, method)
        if had_own:
            object.__setattr__(instance, method, original)
        else:
            object.__delattr__(instance, method)

    return AnnotationHandle([undo])


def annotate_modules(model: nn.Module, *, prefix: str = "") -> AnnotationHandle:
    """Nodes traced in the forward of a submodule carry its fully qualified name.

    A module reached by several names carries the first, as ``named_modules`` gives it.

    Args:
        model: its submodules' ``forward`` are wrapped, its own too if it has a prefix.
        prefix: put before every name, for a part of a larger model.
    """
    undo: list[Callable[[], None]] = []
    for fqn, module in model.named_modules(prefix=prefix):
        if fqn:
            handle = annotate_method(module, "forward", ModuleAnnotation(fqn=fqn))
            undo.append(handle.undo)
    return AnnotationHandle(undo)
