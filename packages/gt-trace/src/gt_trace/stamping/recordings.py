"""Recordings of operators: what was noted, by layer, and in which words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gt_trace._torch_internals import pytree
from gt_trace.stamping.known_operators import Answers
from gt_trace.stamping.known_sizes import SegmentSizes

BEFORE = -1
"""The number of the segment that runs before the first layer."""


class Origin(NamedTuple):
    """Where a tensor came from; a tuple, since a recording makes one for every tensor."""

    layer: int | None
    """The layer in whose segment it was made, or whose state it is; None for all else."""

    place: Any
    """The operator and its output, counted in the segment; or the name of the state or argument."""


@dataclass(slots=True, kw_only=True)
class LayerSegment:
    """What ran from the start of one layer to the start of the next."""

    tokens: list[int] = field(default_factory=list)
    """Operators and autograd nodes with their constants, as numbers of a ``Vocabulary``."""

    origins: list[Origin] = field(default_factory=list)
    """Where every tensor came from that the tokens read, in order."""

    contexts: list[tuple[type | None, Mapping[str, Any]]] = field(default_factory=list)
    """Autograd functions that keep something for their backward, and what they keep."""

    functions: set[type] = field(default_factory=set)
    """Custom autograd functions that ran."""

    num_results: int = 0
    num_foreign: int = 0
    sizes: SegmentSizes = field(default_factory=SegmentSizes)
    """Sizes that only a run will tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnedLeaf:
    """One leaf of what the step returned."""

    gradient_of: str | None = None
    """Name of the state whose gradient the leaf is; None for other leaves."""

    is_tensor: bool = True
    constant: Any = None
    """The leaf itself, if it is no tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRecording:
    """The streams of one run."""

    segments: Mapping[int, LayerSegment]
    outputs: tuple[ReturnedLeaf, ...]
    output_spec: pytree.TreeSpec
    vocabulary: Vocabulary
    """Of the segments' tokens; recordings that are compared have the same."""


class Vocabulary:
    """Numbers for what occurs in streams, the same for all recordings that are compared."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._names: list[str] = []
        self._held: dict[int, Any] = {}
        self.answers: Answers = {}

    def number(self, token: Any, name: object) -> int:
        """The number of ``token``; ``name``, as a text, tells it in messages."""
        found = self._numbers.get(token)
        if found is None:
            found = self._numbers[token] = len(self._names)
            self._names.append(str(name))
        return found

    def identity(self, value: Any) -> int:
        """The id of an object, which stays its own: the object is held."""
        self._held[id(value)] = value
        return id(value)

    def name(self, number: int) -> str:
        """The name of a token."""
        return self._names[number]
