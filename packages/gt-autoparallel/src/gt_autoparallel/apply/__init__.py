"""Applying a plan: parameters become DTensors, the forward runs the planned graph."""

from gt_autoparallel.apply.apply_plan import apply_plan

__all__ = ["apply_plan"]
