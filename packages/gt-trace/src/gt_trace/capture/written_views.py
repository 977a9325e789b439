"""Views whose memory was written after they were made, differentiated as in eager execution.

Autograd makes the ``grad_fn`` of such a view anew: by ``as_strided`` on its base in eager
execution, by the operators that made the view for the tensors of a trace. The gradients are equal,
in other strides, so that a sum over them has other last bits. Inside of a trace, torch functions
take an ``as_strided`` of the base. Source: ``VariableHooks::grad_fn`` in torch's ``variable.cpp``.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gt_trace._torch_internals import (
    FakeTensor,
    FunctionalTensor,
    get_proxy_mode,
    get_unwrapped,
    is_functorch_wrapped_tensor,
)
from gt_trace.capture.stack_traces import line_of_user
from gt_trace.errors import CaptureError

_TRACED = (FakeTensor, FunctionalTensor)

_ACTIVE: dict[int, list[WrittenViews]] = {}
"""The views of the captures that are under way, by threads. The innermost capture is the last."""

_LOCK = threading.Lock()
"""Held while ``autograd.Function.apply`` is replaced or put back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Renewed:
    """A tensor that functions get in the place of a view."""

    view: weakref.ref[torch.Tensor]
    version: int
    """How often the memory of the view had been written."""

    tensor: torch.Tensor
    own: frozenset[str]
    """The attributes that every traced tensor has."""

    def with_attributes(self) -> torch.Tensor:
        """Return the tensor, with the attributes that the step has set on the view."""
        held = vars(self.view())
        vars(self.tensor).update({key: held[key] for key in held.keys() - self.own})
        return self.tensor


class WrittenViews:
    """Records views that torch functions return, and how often their memory had been written."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._ways: dict[int, str] = {}
        self._replaced: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        """The views in whose place other tensors are given to functions, by these."""

        self._renewed: dict[int, _Renewed] = {}

    def returned(self, result: Any, args: tuple[Any, ...]) -> Any:
        """Return what a torch function of ``args`` returns, and note the views in it.

        A function that returns its argument returns the step's tensor, not the one in its place.
        """
        if not self._made and type(result) not in _TRACED and type(result) not in (tuple, list):
            return result
        if (held := self._replaced.get(id(result))) is not None and held[1] is result:
            view = held[0]()
            return result if view is None else view
        if not torch._C._are_functorch_transforms_active():
            self._note(result, args)
        return result

    def _note(self, result: Any, args: tuple[Any, ...]) -> None:
        kind = type(result)
        if kind in _TRACED:
            if result._is_view() and self._version_of(result) is None:
                self._made[id(result)] = weakref.ref(result), result._version
                self._note_way(result, args[0] if args else None)
        elif kind is tuple or kind is list:
            for each in result:
                self._note(each, args)

    def _note_way(self, view: torch.Tensor, source: Any) -> None:
        """Note whether eager execution makes a view anew by its own operators."""
        base: Any = view._base
        key = id(view)
        self._ways.pop(key, None)
        if source is base:
            if any(of(view) != of(base) for of in _REPLAYED_IF_OTHER):
                self._ways[key] = _REPLAYED
            return
        known = source if isinstance(source, torch.Tensor) else base
        if id(known) in self._ways or any(of(view) != of(known) for of in _REPLAYED_IF_OTHER):
            self._ways[key] = _MIXED

    def renewed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a torch function, with views that have the right gradients."""
        if not self._made:
            return args, kwargs
        if torch._C._are_functorch_transforms_active():
            if self._is_written((*args, *kwargs.values())):
                _refuse("torch.vmap or torch.func")
            return args, kwargs
        if not torch.is_grad_enabled():
            if self._is_written((*args, *kwargs.values())) and _runs_function():
                _refuse("an autograd.Function, by an `apply` from outside or behind its own write,")
            return args, kwargs
        num_written = _writes_to_first(func)
        args = (*args[:num_written], *map(self._renew, args[num_written:]))
        return args, {
            name: each if name == "out" else self._renew(each) for name, each in kwargs.items()
        }

    def _renew(self, value: Any) -> Any:
        kind = type(value)
        if kind in _TRACED:
            made = self._version_of(value)
            return value if made is None or made == value._version else self._anew(value)
        if kind is tuple or kind is list:
            return kind([self._renew(each) for each in value])
        return value

    def _is_written(self, values: Iterable[Any]) -> bool:
        """Return whether one of the values is a view, with a gradient, that was written since.

        A transform of ``torch.func`` has wrappers of views.
        """
        for value in values:
            if isinstance(value, tuple | list):
                if self._is_written(value):
                    return True
            elif isinstance(value, torch.Tensor):
                held = value
                while is_functorch_wrapped_tensor(held):
                    held = get_unwrapped(held)
                made = self._version_of(held)
                if made is not None and made != held._version and held.requires_grad:
                    return True
        return False

    @contextmanager
    def in_functions(self) -> Iterator[None]:
        """Inside, ``autograd.Function.apply`` on this thread takes views with right gradients.

        PyTorch calls it without asking the mode for torch functions.
        """
        with _LOCK:
            if not _ACTIVE:
                torch.autograd.Function.apply = _Applies(vars(torch.autograd.Function)["apply"])
            views = _ACTIVE.setdefault(threading.get_ident(), [])
            views.append(self)
        try:
            yield
        finally:
            with _LOCK:
                views.remove(self)
                if not views:
                    del _ACTIVE[threading.get_ident()]
                now = vars(torch.autograd.Function)["apply"]
                if not _ACTIVE and isinstance(now, _Applies):
                    torch.autograd.Function.apply = now.found

    def _version_of(self, view: torch.Tensor) -> int | None:
        """Return how often the memory had been written when a view was made; None if unknown."""
        found = self._made.get(id(view))
        return None if found is None or found[0]() is not view else found[1]

    def _anew(self, view: torch.Tensor) -> torch.Tensor:
        if not _has_gradient(view):
            return view
        if view.retains_grad:
            raise CaptureError(
                "the step retains the gradient of a view (retain_grad) and writes to its memory "
                f"afterwards:\n{line_of_user()}\nCall retain_grad() after the write"
            )
        held = self._renewed.get(id(view))
        if held is not None and held.view() is view and held.version == view._version:
            return held.with_attributes()
        if (way := self._ways.get(id(view))) == _REPLAYED:
            return view
        if way == _MIXED:
            raise CaptureError(
                "the step differentiates a view whose memory was written since the view was made, "
                "and it is a view of a view, one of which is the real part, the imaginary part, "
                f"the conjugate or another reading of the other:\n{line_of_user()}\nEager "
                "execution makes such a view anew by operators that a trace does not have. Write "
                "before the view is made, or out of place"
            )
        base: Any = view._base
        new: torch.Tensor = base.as_strided(view.size(), view.stride(), view.storage_offset())
        renewed = _Renewed(
            view=weakref.ref(view), version=view._version, tensor=new, own=frozenset(vars(new))
        )
        self._renewed[id(view)] = renewed
        self._replaced[id(new)] = weakref.ref(view), new
        self._note(new, (base,))
        return renewed.with_attributes()


class InBackward(TorchFunctionMode):
    """Inside of a backward, in which checkpointing runs layers again, views are those of eager."""

    def __init__(self, views: WrittenViews) -> None:
        super().__init__()
        self._views = views

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        args, named = self._views.renewed(func, args, dict(kwargs or {}))
        return self._views.returned(func(*args, **named), args)


def _has_gradient(view: torch.Tensor) -> bool:
    """Return whether autograd follows a view that was written since.

    To answer, autograd runs the operators that made the view again. The graph does not keep them:
    the base may have other sizes now.
    """
    mode = get_proxy_mode()
    nodes: Any = [] if mode is None else mode.tracer.graph.nodes
    last = next(iter(reversed(nodes)), None)
    try:
        return view.grad_fn is not None
    except RuntimeError:  # of views that may not be differentiated: the function may not do it
        return False
    except IndexError:  # the operators do not fit the base
        return True
    finally:
        for node in [*takewhile(lambda node: node is not last, reversed(nodes))]:
            node.graph.erase_node(node)


def _refuse(user: str) -> None:
    raise CaptureError(
        f"{user} is given a view whose memory was written since the view was made:\n"
        f"{line_of_user()}\nIts gradient may have other strides than in eager execution. Give it "
        "view.clone(), or write before the view is made"
    )


def _runs_function() -> bool:
    """Return whether the ``forward`` of an ``autograd.Function`` is being run."""
    pending, codes = [torch.autograd.Function], set[Any]()
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        # Functions of one decorator share the code of its wrapper.
        codes.add(getattr(inspect.unwrap(kind.forward), "__code__", None))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


class _Apply:
    """The ``apply`` of an ``autograd.Function``, which gives it views with the right gradients.

    It equals the one that PyTorch gives for the class, which a step may have from outside.
    """

    def __init__(self, apply: Any) -> None:
        self._apply = apply

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        captures = _ACTIVE.get(threading.get_ident())
        if not captures or torch.compiler.is_dynamo_compiling():
            return self._apply(*args, **kwargs)
        views = captures[-1]
        args, kwargs = views.renewed(None, args, kwargs)
        return views.returned(self._apply(*args, **kwargs), args)

    def __eq__(self, other: object) -> bool:
        return bool(self._apply == (other._apply if isinstance(other, _Apply) else other))

    def __hash__(self) -> int:
        return hash(self._apply)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._apply, name)


class _Applies:
    """The attribute ``apply`` of ``autograd.Function`` while a step is captured.

    Args:
        found: the attribute as it was, which a library may have replaced.
    """

    def __init__(self, found: Any) -> None:
        self.found = found

    def __get__(self, instance: Any, cls: Any) -> _Apply:
        return _Apply(self.found.__get__(instance, cls))


_REPLAYED = "by the operator that made it"
_MIXED = "by that operator and by as_strided"

_REPLAYED_IF_OTHER = (torch.Tensor.is_conj, torch.Tensor.is_neg, lambda tensor: tensor.dtype)
"""Properties in which a view differs from its base if eager execution replays its operator."""

_WRITES = frozenset({"__setitem__", "__set__", "__delete__"})


def _writes_to_first(func: Any) -> int:
    """Return 1 if a torch function writes to its first argument, else 0."""
    name: str = getattr(func, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    return int(is_in_place or name in _WRITES or name.startswith("__i"))
