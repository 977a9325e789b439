"""Where samples and tokens stand in what a forward takes and returns, as data.

A model whose forwards are laid out differently is another ``InputLayout``, and no other code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gt_config import EpChunkDim

Slicer = Callable[[Any, int, int], Any]
"""(value, start, length) -> the part of a value that is no tensor, along the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDims:
    """Where the samples and the tokens stand in one argument's tensors."""

    batch: int | None = None
    """Tensor dimension of the samples; None: every chunk of samples takes the tensor whole."""

    seq: int | None = None
    """Tensor dimension of the tokens of a sample; None: likewise."""

    def of(self, chunk_dim: EpChunkDim) -> int | None:
        """The tensor dimension that is cut."""
        return self.batch if chunk_dim == "batch" else self.seq


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLayout:
    """How the inputs of a chunked forward are laid out, by argument, and its outputs.

    Where a layout is given, each tensor argument must have a rule in it. Without one, the first
    tensor is the activation, (batch, sequence, ...); of the others those are cut that begin with
    the same two extents, those pass whole in which no extent could be the one that is cut, and
    every other is an error that asks for a layout.
    """

    activation: str
    """Name of the argument that says how many samples or tokens there are."""

    arguments: Mapping[str, TokenDims]
    """Rules by argument name; a rule holds for all tensors in lists, tuples and dicts."""

    slicers: Mapping[type, Slicer] = field(default_factory=dict)
    """How to cut values along the batch that are no tensors, by type (masks of attention)."""

    outputs: Mapping[str, TokenDims] = field(default_factory=dict)
    """Rules for outputs that are not laid out as the activation is, by where they stand in what the
    forward returns: ``"[1]"``, ``"['loss']"``, or ``""`` for a tensor that is returned alone."""

    def __post_init__(self) -> None:
        for name in ("arguments", "slicers", "outputs"):
            object.__setattr__(self, name, _FrozenMapping(getattr(self, name)))


class _FrozenMapping(Mapping[Any, Any]):
    """A mapping that stays as it is. Unlike ``MappingProxyType`` it can be hashed and pickled."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[Any, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)
