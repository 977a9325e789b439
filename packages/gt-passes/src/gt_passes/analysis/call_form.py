"""What a node calls, apart from the nodes that it reads: the same in every layer that is alike.

A model of many layers makes thousands of calls and has some hundred forms of them. What is found
out about a form is found out once, for the layer that has it first; that another layer is like it
is not believed but seen, since equal forms are one object.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch.fx import Node

from gt_passes._torch_internals import OpOverload
from gt_passes.analysis.graph_constants import frozen_literal

_SLOT: Final = object()
"""Stands for a node among the arguments of a form."""

_INTS: Final = object()
"""Begins a list of nothing but integers, which are most."""


class CallForm:
    """A target with its constant arguments, and empty slots where a call has nodes.

    Made by ``call_form`` only; two are the same form exactly if they are the same object.
    """

    __slots__ = ("__weakref__", "_arguments", "is_exact", "num_operands", "target")

    def __init__(
        self,
        target: object,
        arguments: tuple[Hashable, ...],
        *,
        num_operands: int,
        is_exact: bool,
    ) -> None:
        self.target = target
        self._arguments = arguments
        self.num_operands = num_operands
        """Number of slots."""

        self.is_exact = is_exact
        """Whether calls of one form on equal operands are surely the same call: no constant is a
        symbolic size or known by its text only."""

    def filled(self, operands: Sequence[Hashable]) -> tuple[Hashable, ...]:
        """The arguments with something in each slot, in order: nested tuples of plain values.

        Lists and tuples begin with ``"list"``, keyword arguments are pairs.
        """
        remaining = iter(operands)

        def fill(part: Hashable) -> Hashable:
            if part is _SLOT:
                return next(remaining)
            if isinstance(part, tuple):
                if part and part[0] is _INTS:
                    return ("list", *((int, item) for item in part[1:]))
                return tuple(map(fill, part))
            return part

        return tuple(map(fill, self._arguments))


_forms: WeakValueDictionary[Hashable, CallForm] = WeakValueDictionary()
_forms_lock = threading.Lock()


def call_form(
    target: object, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[CallForm, tuple[Node, ...]]:
    """Split a call into its form and its operands: the nodes that it reads, as often as it does.

    Args:
        target: what is called.
        args: of a node.
        kwargs: of a node; their order does not matter.
    """
    operands: list[Node] = []
    inexact: list[object] = []
    arguments = [_frozen(argument, operands, inexact) for argument in args]
    if kwargs:
        arguments += [(name, _frozen(kwargs[name], operands, inexact)) for name in sorted(kwargs)]
    frozen = tuple(arguments)
    # Operators are slow to hash. The form holds its own, so that the identity is no other's.
    key = (id(target) if type(target) is OpOverload else target, frozen)
    form = _forms.get(key)
    if form is None:
        with _forms_lock:
            made = CallForm(target, frozen, num_operands=len(operands), is_exact=not inexact)
            form = _forms.setdefault(key, made)
    return form, tuple(operands)


def _frozen(argument: Any, operands: list[Node], inexact: list[object]) -> Hashable:
    kind = type(argument)
    if kind is Node:
        operands.append(argument)
        return _SLOT
    if kind is int or kind is bool:
        # 1, 1.0 and True are equal and hash alike, but operators tell them apart.
        return (kind, argument)
    if isinstance(argument, (tuple, list)):
        if set(map(type, argument)) == _ONLY_INTS:
            return (_INTS, *argument)
        return ("list", *[_frozen(item, operands, inexact) for item in argument])
    if isinstance(argument, slice):
        bounds = (argument.start, argument.stop, argument.step)
        return ("slice", *[_frozen(item, operands, inexact) for item in bounds])
    if isinstance(argument, dict):
        return (
            "dict",
            *((key, _frozen(item, operands, inexact)) for key, item in argument.items()),
        )
    frozen = frozen_literal(argument)
    if isinstance(argument, SYMBOLIC) or not _is_hashable(argument):
        inexact.append(argument)
    return frozen


_ONLY_INTS = {int}
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Types of symbolic sizes."""


def _is_hashable(argument: object) -> bool:
    try:
        hash(argument)
    except TypeError:
        return False
    return True
