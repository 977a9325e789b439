"""The optimization problem that a graph becomes: numbers only, no tensors, no graph.

Variables choose one of several options each. What connects two variables goes through *labels*:
an option of the producer leaves one of a few layouts, an option of the consumer wants one of a few
layouts, and a matrix over the two prices the way from one to the other. So a pair of nodes with a
hundred options each costs a table of its layouts, not of its options.

    minimize    sum_v unary_v[x_v]  +  sum_e edge_e[left_label(x_u), right_label(x_v)]
                + sum_w multiplicity_w * max(compute_w(x), communication_w(x))
    subject to  sum_v bytes_v[x_v] + edges' bytes <= budget of each memory row

where compute_w and communication_w are again sums of unary and edge tables: what can be
prefetched costs only what its window cannot hide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A choice among ``len(cost_us)`` options."""

    name: str
    cost_us: FloatArray
    """[num_options] Cost of each option that no window can hide or holds; may be inf."""

    window: int | None
    """Window to whose compute ``window_compute_us`` belongs."""

    window_compute_us: FloatArray
    """[num_options] Compute time of each option, counted in its window; zeros without one."""

    memory_bytes: tuple[FloatArray, ...]
    """For each memory row [num_options]: bytes that each option takes."""

    further_compute_us: Mapping[int, FloatArray] = field(default_factory=dict)
    """Other windows in which options compute too -> [num_options] time there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """What connects the options of two variables (or of one with itself)."""

    name: str
    left: int
    right: int
    left_labels: IntArray
    """[options of left] Label of each option."""

    right_labels: IntArray
    """[options of right] Label of each option."""

    cost_us: FloatArray
    """[left labels, right labels] Cost that counts in full; inf forbids the pair."""

    window: int | None
    """Window to whose communication ``window_communication_us`` belongs."""

    window_communication_us: FloatArray
    """[left labels, right labels] Time that its window may hide; zeros without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Compute under which communication hides: max(compute, communication), times multiplicity.

    Tables of variables and edges hold the times of one instance of the window.
    """

    name: str
    multiplicity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """A limit on bytes per rank."""

    name: str
    budget_bytes: float
    fixed_bytes: float
    """Bytes that are taken whatever is chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Alike things, layers of a model, that variables stand for together.

    Choices of a problem are the same for all of them. In a mixture (``mixtures``) each thing takes
    options of its own for the block's variables; nothing outside of a thing sees which.
    """

    name: str
    size: int
    """How many things there are."""

    variables: tuple[int, ...]
    """What each thing may choose for itself. Their edges end in the block, or at variables of no
    block."""

    windows: tuple[int, ...]
    """Windows of which each thing has one to itself: their multiplicity is ``size``."""

    passing_bytes: Mapping[int, tuple[FloatArray, ...]]
    """For each memory row of moments at which a thing is at work, for each of the variables
    [num_options]: of its bytes in that row, those of a thing at work; less than 0 for what only the
    others have then. The other bytes are those of all things together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The whole problem. A variable that stands for several nodes holds the sums of their costs."""

    variables: tuple[Variable, ...]
    edges: tuple[Edge, ...]
    windows: tuple[Window, ...]
    memory: tuple[MemoryRow, ...]
    fixed_us: float = 0.0
    """Cost in us, whatever is chosen."""

    blocks: tuple[Block, ...] = ()
    """Things that may choose differently in mixtures; ``solve`` knows nothing of them."""
