"""Annotations put on while the step runs, so that the traced nodes carry them.

Nothing here patches a class. Methods of the *instances* of one model are wrapped, and the handle
that comes back takes the wrappers off again. Outside a trace the wrappers change nothing.
Source of the mechanism: ``torch.fx.traceback.annotate``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch.fx.traceback as fx_traceback
from torch import nn

from gt_config.node_keys import ModuleAnnotation, NodeAnnotation, Phase, PhaseAnnotation


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


def annotate_method(instance: object, method: str, annotation: NodeAnnotation) -> AnnotationHandle:
    """Annotate what one method of one object traces.

    Args:
        instance: any object with an instance dictionary, usually an ``nn.Module``.
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

    @functools.wraps(original)
    def annotated(*args: Any, **kwargs: Any) -> Any:
        with fx_traceback.annotate(meta):
            return original(*args, **kwargs)

    had_own = method in vars(instance)
    object.__setattr__(instance, method, annotated)

    def undo() -> None:
        if vars(instance).get(method) is not annotated:
            raise RuntimeError(
                f"{type(instance).__name__}.{method} was wrapped again after it was annotated; "
                "undo the later wrapper first"
            )
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
