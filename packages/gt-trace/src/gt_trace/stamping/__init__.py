"""Capture that hardly depends on depth: a few layers are traced, the others stamped.

Of models that run no layers but a program of calls, calls are copied (``trace_by_copying``).
"""

from gt_trace.stamping.compare_steps import step_differences
from gt_trace.stamping.report import StampReport
from gt_trace.stamping.trace_by_copying import (
    CopyReport,
    makes_traced_calls,
    trace_step_by_copying,
)
from gt_trace.stamping.trace_by_stamping import trace_step_by_stamping

__all__ = [
    "CopyReport",
    "StampReport",
    "makes_traced_calls",
    "step_differences",
    "trace_step_by_copying",
    "trace_step_by_stamping",
]
