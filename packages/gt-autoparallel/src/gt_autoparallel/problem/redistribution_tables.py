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
from gt_autoparallel.graph.parameter_chains import ParameterMove
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RedistributionTable:
    """Times from each of some layouts to each of others, in us."""

    in_full_us: FloatArray
    """[sources, targets] What counts in full; inf if there is no way."""

    hidden_us: FloatArray
    """[sources, targets] What a window may hide; 0 if there is no way."""


class RedistributionTables:
    """Makes tables of redistribution times on one mesh by one set of prices."""

    def __init__(self, mesh: MeshShape, prices: StepPrices) -> None:
        self._mesh = mesh
        self._prices = prices
        self._ways: dict[Divisors, _Ways] = {}
        self._step_times: dict[object, list[tuple[float, float]]] = {}
        self._tables: dict[object, RedistributionTable] = {}

    def table(
        self,
        spec: TensorSpec,
        sources: tuple[Layout, ...],
        targets: tuple[Layout, ...],
        move: ParameterMove | None,
    ) -> RedistributionTable:
        """Times of the redistributions of a tensor; ``move`` as for ``StepPrices``."""
        key = (spec.shape, spec.dtype, sources, targets, move)
        known = self._tables.get(key)
        if known is None:
            known = self._tables[key] = self._made(spec, sources, targets, move)
        return known

    def _made(
        self,
        spec: TensorSpec,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        move: ParameterMove | None,
    ) -> RedistributionTable:
        dims = divisors(spec.shape, self._mesh)
        known = self._ways.setdefault(dims, _Ways(dims, self._mesh.sizes))
        ways = known.find(known.numbers(sources), known.numbers(targets))
        in_full, hidden = self._times_of_steps(known, spec, move)[:, known.steps()].sum(axis=2)
        # Where there is no way, the last one.
        return RedistributionTable(
            in_full_us=np.append(in_full, np.inf)[ways], hidden_us=np.append(hidden, 0.0)[ways]
        )

    def _times_of_steps(
        self, known: _Ways, spec: TensorSpec, move: ParameterMove | None
    ) -> FloatArray:
        """[in full or hidden, steps + 1] Times of each known step of a tensor; 0 for none."""
        times = self._step_times.setdefault((spec.shape, spec.dtype, move), [(0.0, 0.0)])
        for before, after in itertools.islice(known.moves, len(times) - 1, None):
            step = step_between(spec.shape, before, after, self._mesh)
            time = self._prices.step_time(step, spec.dtype, self._mesh, move)
            times.append((time.in_full_us, time.hidden_us))
        return np.array(times, dtype=np.float64).T
