"""Applying a plan: parameters become DTensors, the forward runs the planned graph."""

from gt_autoparallel.apply.apply_plan import apply_plan
from gt_autoparallel.apply.evaluation import allow_evaluation

__all__ = ["allow_evaluation", "apply_plan"]
