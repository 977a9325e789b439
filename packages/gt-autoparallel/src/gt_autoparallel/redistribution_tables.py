"""Times of all ways between the layouts of a tensor: one table for each shape and dtype.

A table over a hundred layouts has ten thousand ways of up to a handful of steps, but few different
steps. So ways are found once for all shapes that the mesh cuts alike, each different step is priced
once for a shape, and a table is put together from these by array operations.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gt_autoparallel.layouts import Layout, MeshShape
from gt_autoparallel.placement_graph import TensorSpec
from gt_autoparallel.plan import StepPrices
from gt_autoparallel.problem import FloatArray, IntArray
from gt_autoparallel.redistribution import (
    can_redistribute,
    divisors,
    layouts_on_the_way,
    step_between,
)

__all__ = ["RedistributionTables"]


@dataclass(slots=True)
class _Ways:
    """Ways between layouts of all shapes that the mesh cuts alike."""

    moves: dict[tuple[Layout, Layout], int] = field(default_factory=dict)
    """Number of each step, by the layouts before and after; number 0 stands for no step."""

    number_of: dict[Layout, int] = field(default_factory=dict)
    """Number of each layout."""

    rows: dict[tuple[int, int], tuple[int, ...] | None] = field(default_factory=dict)
    """By the numbers of two layouts, the steps of the way; None where there is no way."""


class RedistributionTables:
    """Makes tables of redistribution times on one mesh by one set of prices."""

    def __init__(self, mesh: MeshShape, prices: StepPrices) -> None:
        self._mesh = mesh
        self._prices = prices
        self._ways: dict[object, _Ways] = {}
        self._step_us: dict[object, list[float]] = {}
        self._tables: dict[object, FloatArray] = {}

    def table(
        self, spec: TensorSpec, sources: tuple[Layout, ...], targets: tuple[Layout, ...]
    ) -> FloatArray:
        """[sources, targets] Time from each source to each target in us; inf if there is no way.

        Args:
            spec: the global tensor.
            sources: layouts that fit it.
            targets: likewise.
        """
        key = (spec.shape, spec.dtype, sources, targets)
        known = self._tables.get(key)
        if known is None:
            known = self._tables[key] = self._made(spec, sources, targets)
        return known

    def _made(
        self, spec: TensorSpec, sources: Sequence[Layout], targets: Sequence[Layout]
    ) -> FloatArray:
        dims = divisors(spec.shape, self._mesh)
        known = self._ways.setdefault(dims, _Ways())
        left, right = (
            [(known.number_of.setdefault(each, len(known.number_of)), each) for each in layouts]
            for layouts in (sources, targets)
        )
        numbers = [self._way(known, dims, source, target) for source in left for target in right]
        longest = max((len(way) for way in numbers if way is not None), default=0)
        steps: IntArray = np.zeros((len(numbers), longest + 1), dtype=np.int64)
        for row, way in enumerate(numbers):
            if way is None:
                steps[row, 0] = -1
            else:
                steps[row, : len(way)] = way
        times = self._times(known, spec)
        total: FloatArray = times[steps].sum(axis=1)
        total[steps[:, 0] < 0] = np.inf
        return total.reshape(len(sources), len(targets))

    def _way(
        self,
        known: _Ways,
        dims: tuple[frozenset[int], ...],
        source: tuple[int, Layout],
        target: tuple[int, Layout],
    ) -> tuple[int, ...] | None:
        key = (source[0], target[0])
        if key in known.rows:
            return known.rows[key]
        way: tuple[int, ...] | None = None
        if can_redistribute(source[1], target[1]):
            layouts = layouts_on_the_way(dims, source[1], target[1], self._mesh)
            way = tuple(
                known.moves.setdefault((before, after), len(known.moves) + 1)
                for before, after in itertools.pairwise(layouts)
            )
        known.rows[key] = way
        return way

    def _times(self, known: _Ways, spec: TensorSpec) -> FloatArray:
        """[steps + 1] Time of each known step for a shape and dtype; 0 for none."""
        times = self._step_us.setdefault((spec.shape, spec.dtype), [0.0])
        moves = list(known.moves)
        for before, after in moves[len(times) - 1 :]:
            step = step_between(spec.shape, before, after, self._mesh)
            times.append(self._prices.step_us(step, spec.dtype, self._mesh))
        return np.array(times, dtype=np.float64)
