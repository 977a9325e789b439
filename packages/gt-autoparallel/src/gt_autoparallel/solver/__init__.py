"""The exact solver of placement problems: numbers in, a proven choice out.

Needs numpy and highspy only. ``solve`` is the entry; the other names are what it takes and gives.
"""

from __future__ import annotations

from gt_autoparallel.solver.evaluation import ChoiceEvaluation, evaluate
from gt_autoparallel.solver.rivals import Rival
from gt_autoparallel.solver.solution import (
    ForbiddenPairsError,
    MemoryBudgetError,
    MemoryShortage,
    Progress,
    ProgressCallback,
    Solution,
    WarmStart,
)
from gt_autoparallel.solver.solve import solve

__all__ = [
    "ChoiceEvaluation",
    "ForbiddenPairsError",
    "MemoryBudgetError",
    "MemoryShortage",
    "Progress",
    "ProgressCallback",
    "Rival",
    "Solution",
    "WarmStart",
    "evaluate",
    "solve",
]
