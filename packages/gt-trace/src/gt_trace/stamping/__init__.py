"""Capture that hardly depends on depth: a few layers are traced, the others stamped."""

from gt_trace.stamping.compare_steps import step_differences
from gt_trace.stamping.report import StampReport
from gt_trace.stamping.trace_by_stamping import trace_step_by_stamping

__all__ = ["StampReport", "step_differences", "trace_step_by_stamping"]
