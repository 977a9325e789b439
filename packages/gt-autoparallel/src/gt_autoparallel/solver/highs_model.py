"""The reduced problem as a linear or mixed-integer program, solved by HiGHS in process.

The linear relaxation is over the local polytope of the pairwise model (Wainwright and Jordan 2008,
"Graphical Models, Exponential Families, and Variational Inference", chapter 8), with links through
labels instead of options, plus one column for each window and one row for each memory budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import highspy
import numpy as np

from gt_autoparallel.errors import SolverError
from gt_autoparallel.solver.problem import FloatArray, IntArray
from gt_autoparallel.solver.reduced_problem import ReducedProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class HighsResult:
    """What HiGHS said."""

    feasible: bool | None
    """Whether the model has a solution; None if the time ended before that was known."""

    optimal: bool
    lower_bound_us: float
    """Dual bound, by HiGHS's word; -inf without one."""

    positions: tuple[IntArray, ...]
    """Solutions as positions among each node's options, best first. The most probable options
    where the relaxation is fractional."""

    weights: tuple[FloatArray, ...]
    """For each node [K]: the first solution as it is. Empty without one."""

    window_prices: FloatArray
    """[windows] Share of the price that compute bears. Empty of a MILP."""

    memory_prices: FloatArray
    """[memory rows] us per byte. Empty of a MILP."""


class HighsModel:
    """Builds the model in the order of the ``add_`` methods, then solves it."""

    def __init__(self, reduced: ReducedProblem) -> None:
        self._reduced = reduced
        self._costs: list[FloatArray] = []
        self._upper: list[FloatArray] = []
        self._num_integer = 0
        self._rows: list[IntArray] = []
        self._columns: list[IntArray] = []
        self._values: list[FloatArray] = []
        self._row_lower: list[float] = []
        self._row_upper: list[float] = []
        self._offset = reduced.constant_us
        self.num_columns = 0
        self._add_choices()
        self._add_links()
        self._add_windows()
        self._add_memory()

    @property
    def num_rows(self) -> int:
        """Rows of the model."""
        return len(self._row_lower)

    def _new_columns(self, costs: FloatArray, upper: float) -> int:
        first = self.num_columns
        self._costs.append(costs)
        self._upper.append(np.full(len(costs), upper))
        self.num_columns += len(costs)
        return first

    def _new_rows(self, count: int, lower: float, upper: float) -> int:
        first = self.num_rows
        self._row_lower += [lower] * count
        self._row_upper += [upper] * count
        return first

    def _entries(self, rows: IntArray | int, columns: IntArray, values: FloatArray | float) -> None:
        count = len(columns)
        self._rows.append(rows if isinstance(rows, np.ndarray) else np.full(count, rows))
        self._columns.append(columns)
        self._values.append(values if isinstance(values, np.ndarray) else np.full(count, values))

    # x_v[k] in {0, 1},    sum_k x_v[k] = 1    for each node v
    def _add_choices(self) -> None:
        self._choice_columns: list[IntArray] = []
        for node in self._reduced.nodes:
            least = float(node.cost.min())
            self._offset += least
            first = self._new_columns(node.cost - least, 1.0)
            columns = np.arange(first, first + len(node.cost))
            self._choice_columns.append(columns)
            self._entries(self._new_rows(1, 1.0, 1.0), columns, 1.0)
        self._num_integer = self.num_columns

    # sum_r y_e[l, r] = sum_{k: label(k) = l} x_u[k]    for each link e = (u, v), label l of u
    # sum_l y_e[l, r] = sum_{k: label(k) = r} x_v[k]    for each label r of v,    y >= 0
    def _add_links(self) -> None:
        self._pairs: dict[int, tuple[IntArray, IntArray, IntArray]] = {}
        for index, link in self._reduced.live_links():
            left, right = np.nonzero(np.isfinite(link.cost))
            costs = link.cost[left, right]
            least = float(costs.min())
            self._offset += least
            first = self._new_columns(costs - least, np.inf)
            columns = np.arange(first, first + len(costs))
            self._pairs[index] = (left, right, columns)
            for side, labels in enumerate((left, right)):
                start = self._new_rows(link.cost.shape[side], 0.0, 0.0)
                self._entries(start + labels, columns, 1.0)
                choice_columns = self._choice_columns[link.ends[side]]
                self._entries(start + link.labels[side], choice_columns, -1.0)

    # minimize multiplicity_w * t_w,    t_w >= compute_w(x),    t_w >= communication_w(x, y)
    def _add_windows(self) -> None:
        self._window_rows: dict[int, int] = {}
        used = {w for node in self._reduced.nodes for w in (*node.compute, *node.communication)}
        used |= {w for _, link in self._reduced.live_links() for w in link.communication}
        for window in sorted(used):
            weight = float(self._reduced.multiplicity[window])
            column = self._new_columns(np.array([weight]), np.inf)
            rows = self._new_rows(2, 0.0, np.inf)
            self._window_rows[window] = rows
            self._entries(np.array([rows, rows + 1]), np.array([column, column]), 1.0)
            for node, columns in zip(self._reduced.nodes, self._choice_columns, strict=True):
                for row, times in ((rows, node.compute), (rows + 1, node.communication)):
                    if window in times:
                        self._entries(row, columns, -times[window])
            for index, link in self._reduced.live_links():
                if window in link.communication:
                    left, right, columns = self._pairs[index]
                    self._entries(rows + 1, columns, -link.communication[window][left, right])

    # sum_v sum_k bytes_v[k] x_v[k] <= budget    for each memory row, in units of its largest entry
    def _add_memory(self) -> None:
        self._memory_rows: dict[int, tuple[int, float]] = {}
        if not len(self._reduced.budget_bytes):
            return
        sizes = [len(columns) for columns in self._choice_columns]
        starts = np.cumsum([0, *sizes[:-1]])
        columns = np.concatenate(self._choice_columns)
        used_bytes = np.concatenate([node.memory for node in self._reduced.nodes], axis=1)
        for row, budget in enumerate(self._reduced.budget_bytes):
            least = np.minimum.reduceat(used_bytes[row], starts)
            most = np.maximum.reduceat(used_bytes[row], starts)
            if math.fsum(most) <= budget:
                continue
            unit = float((most - least).max()) or 1.0
            index = self._new_rows(1, -np.inf, (float(budget) - math.fsum(least)) / unit)
            self._memory_rows[row] = (index, unit)
            more = used_bytes[row] - np.repeat(least, sizes)
            self._entries(index, columns[more > 0], more[more > 0] / unit)

    def solve(
        self, *, integer: bool, seconds: float, gap: float = 0.0, max_nodes: int | None = None
    ) -> HighsResult:
        """Solves the MILP (``integer``) or its LP relaxation within so many seconds.

        A MILP may end at a relative ``gap``, or after ``max_nodes`` of branch and bound.

        Raises:
            SolverError: HiGHS failed.
        """
        costs = np.concatenate(self._costs)
        # Tolerances of HiGHS are absolute: the largest cost becomes 1e4.
        scale = 1e4 / max(float(costs.max()), 1e-12)
        highs = highspy.Highs()  # type: ignore[no-untyped-call]  # highspy leaves it unannotated
        highs.silent()
        highs.setOptionValue("threads", 1)
        highs.setOptionValue("random_seed", 0)
        highs.setOptionValue("time_limit", max(seconds, 0.1))
        highs.setOptionValue("primal_feasibility_tolerance", 1e-9)
        highs.setOptionValue("dual_feasibility_tolerance", 1e-9)
        highs.setOptionValue("mip_feasibility_tolerance", 1e-9)
        highs.setOptionValue("mip_rel_gap", gap)
        highs.setOptionValue("mip_abs_gap", 1e-9)
        if max_nodes is not None:
            highs.setOptionValue("mip_max_nodes", max_nodes)
        highs.passModel(self._program(costs * scale, integer=integer))
        highs.run()
        return self._result(highs, scale, integer=integer)

    def _program(self, costs: FloatArray, *, integer: bool) -> highspy.HighsLp:
        rows = np.concatenate(self._rows)
        columns = np.concatenate(self._columns)
        order = np.lexsort((rows, columns))
        program = highspy.HighsLp()
        program.num_col_ = self.num_columns
        program.num_row_ = self.num_rows
        program.col_cost_ = costs
        program.col_lower_ = np.zeros(self.num_columns)
        program.col_upper_ = np.concatenate(self._upper)
        program.row_lower_ = np.array(self._row_lower)
        program.row_upper_ = np.array(self._row_upper)
        program.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        counts = np.bincount(columns, minlength=self.num_columns)
        program.a_matrix_.start_ = np.concatenate([[0], np.cumsum(counts)])
        program.a_matrix_.index_ = rows[order]
        program.a_matrix_.value_ = np.concatenate(self._values)[order]
        if integer:
            kinds = [highspy.HighsVarType.kInteger] * self._num_integer
            kinds += [highspy.HighsVarType.kContinuous] * (self.num_columns - self._num_integer)
            program.integrality_ = kinds
        return program

    def _result(self, highs: highspy.Highs, scale: float, *, integer: bool) -> HighsResult:
        status = highs.getModelStatus()
        info = highs.getInfo()
        statuses = highspy.HighsModelStatus
        known = {
            statuses.kOptimal: True,
            statuses.kInfeasible: False,
            statuses.kUnboundedOrInfeasible: False,  # never unbounded: all costs are at least 0
            statuses.kTimeLimit: None,
            statuses.kIterationLimit: None,
            statuses.kSolutionLimit: None,  # also of nodes
            statuses.kUnknown: None,  # for rounding it ends at none: as at a limit
        }
        if status not in known:
            raise SolverError(f"HiGHS ended with status {highs.modelStatusToString(status)!r}")
        solution = highs.getSolution()
        has_point = solution.value_valid and (
            status == statuses.kOptimal
            or info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        )
        positions: tuple[IntArray, ...] = ()
        weights: tuple[FloatArray, ...] = ()
        if has_point:
            values = np.asarray(solution.col_value)
            weights = tuple(values[columns] for columns in self._choice_columns)
            positions = (np.array([int(w.argmax()) for w in weights], dtype=np.int64),)
        bound = -math.inf
        if integer and math.isfinite(info.mip_dual_bound):
            bound = info.mip_dual_bound / scale + self._offset
        elif not integer and status == statuses.kOptimal:
            bound = info.objective_function_value / scale + self._offset
        windows, memory = self._duals(solution, scale, skip=integer)
        return HighsResult(
            feasible=True if has_point else known[status],
            optimal=status == statuses.kOptimal,
            lower_bound_us=bound,
            positions=positions,
            weights=weights,
            window_prices=windows,
            memory_prices=memory,
        )

    def _duals(
        self, solution: highspy.HighsSolution, scale: float, *, skip: bool
    ) -> tuple[FloatArray, FloatArray]:
        """Prices of windows and of memory rows."""
        if skip or not solution.dual_valid:
            return np.zeros(0), np.zeros(0)
        duals = np.asarray(solution.row_dual) / scale
        windows = np.ones(len(self._reduced.multiplicity))
        for window, share in self._reduced.linear_windows.items():
            windows[window] = share
        for window, row in self._window_rows.items():
            weight = float(self._reduced.multiplicity[window])
            windows[window] = min(max(duals[row] / max(weight, 1e-300), 0.0), 1.0)
        memory = np.zeros(len(self._reduced.budget_bytes))
        for row, (index, unit) in self._memory_rows.items():
            memory[row] = max(-float(duals[index]) / unit, 0.0)
        return windows, memory
