"""Choices in which alike things differ: how many of them take which variant is counted.

A variable that stands for thirty layers takes one option for all of them. Under a budget that makes
large steps: all layers keep a value, or none does. In a mixture each thing of a block takes options
of its own for the block's variables. What that costs is a problem again, in which each variable of
the block is there once for each group of things that act alike, with its part of the costs, and
each group has windows and a memory row of its own:

    sum_g |g| / n * cost_v[x_vg],    |g| * max(compute_wg, communication_wg),
    kept bytes of all groups + passing bytes of group g <= budget    for each group g

Groups of 1, 1, 2, 4, 8, ... things can take any option in any number of things. Only variables that
have more than one option left are split, so that few candidates make a small problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gt_autoparallel.solver.arc_consistency import make_arc_consistent
from gt_autoparallel.solver.evaluation import evaluate
from gt_autoparallel.solver.highs_model import HighsModel
from gt_autoparallel.solver.problem import (
    Edge,
    FloatArray,
    IntArray,
    MemoryRow,
    Problem,
    Variable,
)
from gt_autoparallel.solver.reduced_problem import reduce_problem

_ROOM = 1e-8
"""Of a budget: what a program leaves free if its tolerances have exceeded it by some bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """What each thing takes, and what all of it costs."""

    choices: tuple[tuple[int, ...], ...]
    """For each variable: the option of each thing of its block; of one in no block a single one."""

    objective_us: float
    """Inf if something forbidden is taken."""

    memory_bytes: tuple[float, ...]
    """For each memory row: the most that any thing's own row takes, with the fixed bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitProblem:
    """A problem in which groups of things choose, and whose choices those are."""

    problem: Problem
    origins: tuple[tuple[int, int | None], ...]
    """For each variable: the variable that it is made of, and its group; None: of all things."""

    options: tuple[IntArray, ...]
    """For each variable: the options that it has, as those of the variable it is made of."""

    groups: tuple[tuple[int, ...], ...]
    """For each block the sizes of its groups."""

    rows: tuple[int, ...]
    """For each memory row: the row that it is made of."""


def doubling_groups(size: int) -> tuple[int, ...]:
    """1, 1, 2, 4, 8, ... and what is left of ``size``: any number is the sum of some of them."""
    counts: dict[int, int] = {}
    for place in range(size):
        counts[place.bit_length()] = counts.get(place.bit_length(), 0) + 1
    return tuple(counts.values())


def split_problem(
    problem: Problem,
    allowed: Sequence[IntArray],
    *,
    groups: Sequence[Sequence[int]] | None = None,
) -> SplitProblem:
    """The problem in which groups of things take any of some options.

    Args:
        problem: with blocks.
        allowed: for each variable the options that may be taken, at least one.
        groups: for each block the sizes of its groups; ``doubling_groups`` by default, and one
            group for a block without anything to choose.
    """
    return _Splitting(problem, allowed, groups).split()


class _Splitting:
    def __init__(
        self,
        problem: Problem,
        allowed: Sequence[IntArray],
        groups: Sequence[Sequence[int]] | None,
    ) -> None:
        self._problem = problem
        self._allowed = allowed
        self._block_of = {
            variable: (number, position)
            for number, block in enumerate(problem.blocks)
            for position, variable in enumerate(block.variables)
            if len(allowed[variable]) > 1
        }
        splits = {number for number, _ in self._block_of.values()}
        self._groups = [
            tuple(groups[number])
            if groups is not None
            else doubling_groups(block.size)
            if number in splits
            else (block.size,)
            for number, block in enumerate(problem.blocks)
        ]
        block_of_window = {w: n for n, block in enumerate(problem.blocks) for w in block.windows}
        self._windows: list[int] = []
        """The window that each is made of."""
        self._multiplicities: list[int] = []
        self._copies: dict[int, tuple[int, ...]] = {}
        """From a window to those made of it: one for each group, or one."""
        for number, window in enumerate(problem.windows):
            sizes: tuple[int, ...] = (window.multiplicity,)
            if number in block_of_window:
                sizes = self._groups[block_of_window[number]]
            first = len(self._windows)
            self._copies[number] = tuple(range(first, first + len(sizes)))
            self._windows += [number] * len(sizes)
            self._multiplicities += sizes
        block_of_row = {
            row: number
            for number, block in enumerate(problem.blocks)
            for row in block.passing_bytes
        }
        self._rows: list[tuple[int, int | None, int]] = []
        """For each row: what it is made of, its block and its group."""
        for row in range(len(problem.memory)):
            owner = block_of_row.get(row)
            count = 1 if owner is None else len(self._groups[owner])
            self._rows += [(row, owner, group) for group in range(count)]

    def split(self) -> SplitProblem:
        variables: list[Variable] = []
        origins: list[tuple[int, int | None]] = []
        self._places: list[list[int]] = []
        for number, variable in enumerate(self._problem.variables):
            first = len(variables)
            if number in self._block_of:
                groups: list[int | None] = [*range(len(self._groups[self._block_of[number][0]]))]
            else:
                groups = [None]
            variables += [self._variable(number, variable, group) for group in groups]
            origins += [(number, group) for group in groups]
            self._places.append(list(range(first, len(variables))))
        problem = self._problem
        return SplitProblem(
            problem=Problem(
                variables=tuple(variables),
                edges=tuple(part for edge in problem.edges for part in self._edges(edge)),
                windows=tuple(
                    replace(problem.windows[window], multiplicity=size)
                    for window, size in zip(self._windows, self._multiplicities, strict=True)
                ),
                memory=tuple(problem.memory[row] for row, _, _ in self._rows),
                fixed_us=problem.fixed_us,
            ),
            origins=tuple(origins),
            options=tuple(self._allowed[number] for number, _ in origins),
            groups=tuple(self._groups),
            rows=tuple(row for row, _, _ in self._rows),
        )

    def _variable(self, number: int, variable: Variable, group: int | None) -> Variable:
        """A variable of all things, or of one group."""
        options = self._allowed[number]
        share, block, position = 1.0, -1, -1
        if group is not None:
            block, position = self._block_of[number]
            share = self._groups[block][group] / self._problem.blocks[block].size
        compute: dict[int, FloatArray] = {}
        own = {} if variable.window is None else {variable.window: variable.window_compute_us}
        for times_of in (own, variable.further_compute_us):
            for window, times in times_of.items():
                copies = self._copies[window]
                for copy in copies if group is None else (copies[group],):
                    compute[copy] = compute.get(copy, 0.0) + times[options]
        memory = []
        for row, owner, group_of_row in self._rows:
            taken = variable.memory_bytes[row][options]
            if group is not None and row in self._problem.blocks[block].passing_bytes:
                passing = self._problem.blocks[block].passing_bytes[row][position][options]
                at_work = (owner, group_of_row) == (block, group)
                taken = (taken - passing) * share + (passing if at_work else 0.0)
            else:
                taken = taken * share
            memory.append(taken)
        return Variable(
            name=variable.name,
            cost_us=variable.cost_us[options] * share,
            window=None,
            window_compute_us=np.zeros(len(options)),
            memory_bytes=tuple(memory),
            further_compute_us=compute,
        )

    def _edges(self, edge: Edge) -> list[Edge]:
        """An edge for each group of the block at its ends; or one for each copy of its window."""
        labels, kept = [], []
        for end, of_option in ((edge.left, edge.left_labels), (edge.right, edge.right_labels)):
            used, places = np.unique(of_option[self._allowed[end]], return_inverse=True)
            labels.append(places)
            kept.append(used)
        grid = np.ix_(*kept)
        cost, hidden = edge.cost_us[grid], edge.window_communication_us[grid]
        ends = [self._places[edge.left], self._places[edge.right]]
        copies: tuple[int | None, ...] = (None,) if edge.window is None else ()
        copies = copies or self._copies[edge.window]  # type: ignore[index]  # there is a window
        split = [end for end in (edge.left, edge.right) if end in self._block_of]
        made = []
        for number in range(max(*map(len, ends), len(copies))):
            share = 0.0 if number else 1.0
            if split:
                block = self._block_of[split[0]][0]
                share = self._groups[block][number] / self._problem.blocks[block].size
            made.append(
                replace(
                    edge,
                    left=ends[0][number if len(ends[0]) > 1 else 0],
                    right=ends[1][number if len(ends[1]) > 1 else 0],
                    left_labels=labels[0],
                    right_labels=labels[1],
                    cost_us=np.where(np.isfinite(cost), cost * share, np.inf)
                    if share
                    else np.where(np.isfinite(cost), 0.0, np.inf),
                    window=copies[number if len(copies) > 1 else 0],
                    window_communication_us=hidden,
                )
            )
        return made


def mixture_of(problem: Problem, split: SplitProblem, choices: Sequence[int]) -> Mixture:
    """What choices of a split problem are for each thing."""
    found = evaluate(split.problem, choices)
    block_of = {v: number for number, block in enumerate(problem.blocks) for v in block.variables}
    things: list[list[int]] = [[] for _ in problem.variables]
    for (variable, group), options, choice in zip(
        split.origins, split.options, choices, strict=True
    ):
        count = 1
        if variable in block_of:
            sizes = split.groups[block_of[variable]]
            count = sum(sizes) if group is None else sizes[group]
        things[variable] += [int(options[choice])] * count
    most = [
        max(
            taken
            for taken, row in zip(found.memory_bytes, split.rows, strict=True)
            if row == wanted
        )
        for wanted in range(len(problem.memory))
    ]
    return Mixture(
        choices=tuple(map(tuple, things)),
        objective_us=found.objective_us,
        memory_bytes=tuple(most),
    )


def evaluate_mixture(problem: Problem, choices: Sequence[Sequence[int]]) -> Mixture:
    """What a mixture costs; ``choices`` are those of the things, as ``Mixture`` has them."""
    allowed = [np.unique(np.asarray(each, dtype=np.int64)) for each in choices]
    groups = [(1,) * block.size for block in problem.blocks]
    split = split_problem(problem, allowed, groups=groups)
    picked = [
        int(np.searchsorted(options, choices[variable][group or 0]))
        for (variable, group), options in zip(split.origins, split.options, strict=True)
    ]
    return mixture_of(problem, split, picked)


def alike_mixture(problem: Problem, choices: Sequence[int]) -> Mixture:
    """The mixture in which all things take the same: one choice for each variable."""
    sizes = [1] * len(problem.variables)
    for block in problem.blocks:
        for variable in block.variables:
            sizes[variable] = block.size
    found = evaluate(problem, choices)
    return Mixture(
        choices=tuple((choice,) * size for choice, size in zip(choices, sizes, strict=True)),
        objective_us=found.objective_us,
        memory_bytes=found.memory_bytes,
    )


def best_mixture(
    problem: Problem,
    allowed: Sequence[IntArray],
    *,
    relative_gap: float,
    seconds: float,
    max_nodes: int,
) -> Mixture | None:
    """The cheapest mixture of some options that keeps the budgets, as HiGHS finds it.

    Args:
        problem: with blocks.
        allowed: for each variable the options that may be taken, at least one.
        relative_gap: to the cheapest of these mixtures.
        seconds: HiGHS ends after so long.
        max_nodes: or after so many nodes of branch and bound.

    Returns:
        None if there is none, or none was found.
    """
    split = split_problem(problem, allowed)
    for room in (0.0, _ROOM):
        memory = tuple(_tightened(row, room) for row in split.problem.memory)
        reduced = reduce_problem(replace(split.problem, memory=memory))
        if make_arc_consistent(reduced) is not None:
            return None
        reduced.compact_links()
        reduced.settle_windows()
        result = HighsModel(reduced).solve(
            integer=True, seconds=seconds, gap=relative_gap, max_nodes=max_nodes
        )
        if not result.positions:
            return None
        choices = reduced.choices(result.positions[0])
        found = evaluate(split.problem, choices)
        if np.isfinite(found.objective_us) and not any(found.excess_bytes(split.problem)):
            return mixture_of(problem, split, choices)
    return None


def _tightened(row: MemoryRow, room: float) -> MemoryRow:
    if not np.isfinite(row.budget_bytes):
        return row
    return replace(row, budget_bytes=row.budget_bytes - room * abs(row.budget_bytes))
