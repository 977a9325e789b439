"""The exact solver of placement problems: numbers in, a proven choice out.

Its files import numpy and highspy only. ``solve`` is the entry; the other names are what it takes
and gives.

::

    problem, solution, evaluation, validation
                       what is solved, what comes out, what a choice costs, what is refused
    solve, search, bounding, branching, incumbent
                       the search: bounds from below, choices from above
    deadline           when a search ends
    reduced_problem, arc_consistency, dominance
                       what is left of the problem, and what shrinks it
    message_passing, elimination, price_model
                       lower bounds and prices without a linear program
    highs_model, restricted_programs
                       linear and mixed-integer programs
    mixed_search, mixtures
                       choices in which alike things differ, counted by variants, and their bound
    option_bounds      what every option costs at least
    rivals, ties, infeasibility
                       what must not be cheaper; fewer bytes at equal cost; why there is no choice
"""

from __future__ import annotations

from gt_autoparallel.solver.mixed_search import solve_mixed
from gt_autoparallel.solver.mixtures import Mixture, evaluate_mixture
from gt_autoparallel.solver.option_bounds import option_bounds
from gt_autoparallel.solver.rivals import Rival
from gt_autoparallel.solver.solution import (
    ForbiddenPairsError,
    MemoryBudgetError,
    Progress,
    Solution,
    WarmStart,
)
from gt_autoparallel.solver.solve import solve

__all__ = [
    "ForbiddenPairsError",
    "MemoryBudgetError",
    "Mixture",
    "Progress",
    "Rival",
    "Solution",
    "WarmStart",
    "evaluate_mixture",
    "option_bounds",
    "solve",
    "solve_mixed",
]
