"""Prices of windows and budgets by cutting planes.

Every choice x, whether it keeps the budgets or not, is a linear upper bound on what the dual
function can be at any prices (s, p):

    q(s, p) <= cost(x) + sum_w multiplicity_w * (s_w compute_w(x) + (1 - s_w) communication_w(x))
                       + sum_r p_r * (bytes_r(x) - budget_r)

The prices where the least of these bounds is largest are the next to try (Kelley 1960, "The
Cutting-Plane Method for Solving Convex Programs"), halfway from the best prices yet, which tames
the method's jumps. There are few prices, so few cuts are enough. The duals of the cuts are a mix of
choices that solves the relaxation (Dantzig and Wolfe 1960): branching looks at where they differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import highspy
import numpy as np

from gt_autoparallel.solver.evaluation import ChoiceEvaluation
from gt_autoparallel.solver.message_passing import Prices
from gt_autoparallel.solver.problem import FloatArray, Problem


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """A choice without forbidden options or pairs, and what it takes."""

    choices: tuple[int, ...]
    constant: float
    """Its part of the bound that no price changes."""

    slope: FloatArray
    """[windows + memory rows] us by which the bound grows with each price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceStep:
    """Where the cuts point."""

    prices: Prices
    bound_us: float
    """No prices give a larger bound than this, as far as prices below the largest tried go."""

    weights: tuple[float, ...]
    """Weight of each cut in the mix that solves the relaxation."""


@dataclass(slots=True)
class PriceModel:
    """The cuts of one problem; shared by all parts into which it is branched."""

    problem: Problem
    cuts: list[Cut] = field(default_factory=list)
    _known: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def is_needed(self) -> bool:
        """Whether there are any prices."""
        return bool(self.problem.windows or self.problem.memory)

    def add(self, choices: tuple[int, ...], found: ChoiceEvaluation) -> None:
        """Adds the cut of a choice of finite cost."""
        if choices in self._known:
            return
        self._known.add(choices)
        multiplicity = np.array([w.multiplicity for w in self.problem.windows], dtype=np.float64)
        compute = np.array(found.window_compute_us)
        communication = np.array(found.window_communication_us)
        hidden = float(multiplicity @ np.maximum(compute, communication))
        budgets = np.array([row.budget_bytes for row in self.problem.memory])
        excess = np.where(np.isfinite(budgets), np.array(found.memory_bytes) - budgets, -1.0)
        self.cuts.append(
            Cut(
                choices=choices,
                constant=found.objective_us - hidden + float(multiplicity @ communication),
                slope=np.concatenate([multiplicity * (compute - communication), excess]),
            )
        )

    def step(
        self, cuts: list[Cut], *, lower: FloatArray, upper: FloatArray, scale_us: float
    ) -> PriceStep | None:
        """The prices between ``lower`` and ``upper`` [windows + rows] where ``cuts`` allow most.

        ``scale_us`` is about the size of the objective, for the tolerances of HiGHS.
        """
        count = len(lower)
        slopes = np.stack([cut.slope for cut in cuts]) / scale_us
        constants = np.array([cut.constant for cut in cuts]) / scale_us
        units = np.maximum(np.abs(slopes).max(axis=0), 1e-12)
        # maximize z    with z - sum_j slope_ij price_j <= constant_i for each cut i
        program = highspy.HighsLp()
        program.num_col_ = count + 1
        program.num_row_ = len(cuts)
        program.sense_ = highspy.ObjSense.kMaximize
        program.col_cost_ = np.concatenate([[1.0], np.zeros(count)])
        program.col_lower_ = np.concatenate([[-np.inf], lower * units])
        program.col_upper_ = np.concatenate([[np.inf], upper * units])
        program.row_lower_ = np.full(len(cuts), -np.inf)
        program.row_upper_ = constants
        matrix = np.concatenate([np.ones((len(cuts), 1)), -slopes / units], axis=1)
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.arange(0, matrix.size + 1, count + 1)
        program.a_matrix_.index_ = np.tile(np.arange(count + 1), len(cuts))
        program.a_matrix_.value_ = matrix.ravel()
        highs = highspy.Highs()  # type: ignore[no-untyped-call]  # highspy leaves it unannotated
        highs.silent()
        highs.setOptionValue("threads", 1)
        highs.setOptionValue("random_seed", 0)
        highs.passModel(program)
        highs.run()
        if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        solution = highs.getSolution()
        values = np.clip(np.asarray(solution.col_value)[1:] / units, lower, upper)
        windows = len(self.problem.windows)
        return PriceStep(
            prices=Prices(windows=values[:windows], memory=values[windows:]),
            bound_us=float(solution.col_value[0]) * scale_us,
            weights=tuple(np.abs(np.asarray(solution.row_dual)).tolist()),
        )
