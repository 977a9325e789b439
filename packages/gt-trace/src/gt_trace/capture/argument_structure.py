"""In what the structure of a call's arguments differs from the captured one, told place by place.

A tree's own text is no answer: it has no names, and that of a mask of FlexAttention holds every
global name of the modules that its functions are from.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gt_trace._torch_internals import pytree
from gt_trace.capture.block_masks import context_differences
from gt_trace.capture.graph_inputs import ArgumentSignature

_MAPPINGS = (dict, OrderedDict)
"""Types of trees whose context is the list of their keys."""


def structure_differences(
    captured: pytree.TreeSpec,
    arguments: Sequence[ArgumentSignature],
    now: pytree.TreeSpec,
    leaves: Sequence[Any],
) -> list[str]:
    """A line for each place at which two trees of (args, kwargs) differ."""
    return list(_Comparison(arguments, leaves).arguments(captured, now))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A subtree of one of the two trees."""

    spec: pytree.TreeSpec
    first_leaf: int

    def children(self) -> list[_Place]:
        places: list[_Place] = []
        first = self.first_leaf
        for child in self.spec.children():
            places.append(_Place(spec=child, first_leaf=first))
            first += child.num_leaves
        return places


class _Comparison:
    def __init__(self, arguments: Sequence[ArgumentSignature], leaves: Sequence[Any]) -> None:
        self._arguments = arguments
        self._leaves = leaves

    def arguments(self, captured: pytree.TreeSpec, now: pytree.TreeSpec) -> Iterator[str]:
        want_positional, want_keywords = _Place(spec=captured, first_leaf=0).children()
        have_positional, have_keywords = _Place(spec=now, first_leaf=0).children()
        want, have = want_positional.children(), have_positional.children()
        if len(want) != len(have):
            yield f"{len(have)} positional arguments, captured with {len(want)}"
        for position, (one, other) in enumerate(zip(want, have, strict=False)):
            yield from self._differences(self._name(one, position), one, other)
        yield from self._of_mappings("", want_keywords, have_keywords)

    def _differences(self, name: str, want: _Place, have: _Place) -> Iterator[str]:
        if want.spec == have.spec:
            return
        if want.spec.type is not have.spec.type:
            yield f"{name}: {self._now(have)}, captured as {self._captured(want)}"
        elif want.spec.type in _MAPPINGS:
            yield from self._of_mappings(name, want, have)
        elif want.spec.context != have.spec.context:
            kind = want.spec.type.__name__
            for what, before, after in context_differences(want.spec, have.spec):
                yield f"{name}: {kind} with {what} {after}, captured with {before}"
        elif want.spec.num_children != have.spec.num_children:
            count, captured_count = have.spec.num_children, want.spec.num_children
            yield f"{name}: {count} items, captured with {captured_count}"
        else:
            pairs = zip(want.children(), have.children(), strict=True)
            for position, (one, other) in enumerate(pairs):
                yield from self._differences(f"{name}[{position}]", one, other)

    def _of_mappings(self, name: str, want: _Place, have: _Place) -> Iterator[str]:
        captured = dict(zip(want.spec.context, want.children(), strict=True))
        found = dict(zip(have.spec.context, have.children(), strict=True))
        for key in captured:
            if key not in found:
                yield f"{_item(name, key)}: missing"
        for key in found:
            if key not in captured:
                yield f"{_item(name, key)}: not captured"
        if captured.keys() == found.keys() and list(captured) != list(found):
            yield f"{name or 'keywords'}: in the order {list(found)}, captured as {list(captured)}"
        for key in captured:
            if key in found:
                yield from self._differences(_item(name, key), captured[key], found[key])

    def _name(self, place: _Place, position: int) -> str:
        """What a positional argument is called, which the names of its leaves begin with."""
        fallback = f"args[{position}]"
        if place.spec.num_leaves == 0:
            return fallback
        leaf = self._arguments[place.first_leaf].name
        if leaf.startswith(fallback):
            return fallback
        return leaf.split("[", 1)[0].split(".", 1)[0]

    def _captured(self, place: _Place) -> str:
        if place.spec.is_leaf():
            return self._arguments[place.first_leaf].describe()
        return str(place.spec.type.__name__)

    def _now(self, place: _Place) -> str:
        if not place.spec.is_leaf():
            return str(place.spec.type.__name__)
        leaf = self._leaves[place.first_leaf]
        if isinstance(leaf, torch.Tensor):
            return f"{leaf.dtype} {list(leaf.shape)}"
        return repr(leaf)


def _item(name: str, key: object) -> str:
    return f"{name}[{key!r}]" if name else str(key)
