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

from gt_autoparallel.graph.layouts import Layout, MeshShape
from gt_autoparallel.graph.placement_graph import TensorSpec
from gt_autoparallel.graph.redistribution import step_between
from gt_autoparallel.graph.redistribution_ways import (
    CodedLayout,
    Divisors,
    can_become,
    coded,
    divisors,
    way_between,
)
from gt_autoparallel.prices.costs import StepPrices
from gt_autoparallel.solver.problem import FloatArray, IntArray

_UNKNOWN, _NO_WAY = -2, -1


@dataclass(slots=True)
class _Ways:
    """Ways between layouts of all shapes that the mesh cuts alike."""

    dims: Divisors
    sizes: tuple[int, ...]
    """Number of ranks along each axis of the mesh."""

    layouts: dict[CodedLayout, int] = field(default_factory=dict)
    """Number of each layout that was seen."""

    moves: dict[tuple[CodedLayout, CodedLayout], int] = field(default_factory=dict)
    """Number of each step, by the layouts before and after; number 0 stands for no step."""

    ways: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Number of each way, by its steps."""

    between: IntArray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    """[layouts, layouts] Number of the way from one to another."""

    _steps: IntArray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))

    def numbers(self, layouts: Sequence[Layout]) -> IntArray:
        """[layouts] Their numbers, with room for them in ``between``."""
        found = [self.layouts.setdefault(coded(each), len(self.layouts)) for each in layouts]
        more = len(self.layouts) - len(self.between)
        if more > 0:
            self.between = np.pad(self.between, (0, more), constant_values=_UNKNOWN)
        return np.array(found, dtype=np.int64)

    def find(self, sources: IntArray, targets: IntArray) -> IntArray:
        """[sources, targets] Numbers of the ways between layouts, by the layouts' numbers."""
        grid = np.ix_(sources, targets)
        unknown = np.argwhere(self.between[grid] == _UNKNOWN)
        if len(unknown):
            layouts = list(self.layouts)
            for row, column in unknown.tolist():
                source, target = int(sources[row]), int(targets[column])
                self.between[source, target] = self._way(layouts[source], layouts[target])
        found: IntArray = self.between[grid]
        return found

    def _way(self, source: CodedLayout, target: CodedLayout) -> int:
        if not can_become(source, target):
            return _NO_WAY
        layouts = way_between(self.dims, source, target, self.sizes)
        steps = tuple(
            self.moves.setdefault(move, len(self.moves) + 1) for move in itertools.pairwise(layouts)
        )
        return self.ways.setdefault(steps, len(self.ways))

    def steps(self) -> IntArray:
        """[ways, steps] Numbers of the steps of each way, filled up with 0."""
        if len(self._steps) < len(self.ways):
            longest = max(map(len, self.ways))
            filled = [way + (0,) * (longest - len(way)) for way in self.ways]
            self._steps = np.array(filled, dtype=np.int64).reshape(len(self.ways), longest)
        return self._steps


class RedistributionTables:
    """Makes tables of redistribution times on one mesh by one set of prices."""

    def __init__(self, mesh: MeshShape, prices: StepPrices) -> None:
        self._mesh = mesh
        self._prices = prices
        self._ways: dict[Divisors, _Ways] = {}
        self._step_us: dict[object, list[float]] = {}
        self._tables: dict[object, FloatArray] = {}

    def table(
        self, spec: TensorSpec, sources: tuple[Layout, ...], targets: tuple[Layout, ...]
    ) -> FloatArray:
        """[sources, targets] Time from each source to each target in us; inf if there is no way."""
        key = (spec.shape, spec.dtype, sources, targets)
        known = self._tables.get(key)
        if known is None:
            known = self._tables[key] = self._made(spec, sources, targets)
        return known

    def _made(
        self, spec: TensorSpec, sources: Sequence[Layout], targets: Sequence[Layout]
    ) -> FloatArray:
        dims = divisors(spec.shape, self._mesh)
        known = self._ways.setdefault(dims, _Ways(dims, self._mesh.sizes))
        ways = known.find(known.numbers(sources), known.numbers(targets))
        of_way = self._step_times(known, spec)[known.steps()].sum(axis=1)
        return np.append(of_way, np.inf)[ways]  # where there is no way, the last one

    def _step_times(self, known: _Ways, spec: TensorSpec) -> FloatArray:
        """[steps + 1] Time of each known step for a shape and dtype; 0 for none."""
        times = self._step_us.setdefault((spec.shape, spec.dtype), [0.0])
        for before, after in itertools.islice(known.moves, len(times) - 1, None):
            step = step_between(spec.shape, before, after, self._mesh)
            times.append(self._prices.step_us(step, spec.dtype, self._mesh))
        return np.array(times, dtype=np.float64)
