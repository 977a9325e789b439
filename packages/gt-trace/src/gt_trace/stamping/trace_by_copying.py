"""Capture of a program of calls: equal calls are traced once, and copied.

For models that do not run their layers, as one that a solver placed: it runs the instructions of
its plan (``gt_trace.capture.copied_calls``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from gt_trace.capture.copied_calls import copied_calls
from gt_trace.capture.trace import trace_step
from gt_trace.capture.traced_step import TracedStep
from gt_trace.stamping.compare_steps import step_differences
from gt_trace.stamping.report import StampingError


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """How many calls were traced, and how many copied."""

    num_calls: int
    num_copied: int
    compared: bool = False
    """Whether the full trace was made too, and found equal."""

    trace_seconds: float = 0.0
    """Processor time."""

    @property
    def stamped(self) -> bool:
        """Whether calls were copied."""
        return self.num_copied > 0

    def __str__(self) -> str:
        """One line for a log."""
        how = ", equal to the full trace" if self.compared else ""
        traced = self.num_calls - self.num_copied
        return f"{traced:,} of {self.num_calls:,} calls traced, the others copied{how}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedCapture:
    """A captured step, and how it was made."""

    step: TracedStep
    report: CopyReport


def makes_traced_calls(module: nn.Module | None) -> bool:
    """Whether the forward of ``module`` says that it makes its calls by ``traced_call``."""
    forward = None if module is None else vars(module).get("forward")
    return bool(getattr(forward, "makes_traced_calls", False))


def trace_step_by_copying(
    fn: Callable[..., Any], *, compare: bool = False, **options: Any
) -> Callable[..., CopiedCapture]:
    """Capture ``fn`` as ``trace_step`` does; of equal calls all but the first are copied.

    Args:
        fn: see ``trace_step``. What it calls by ``traced_call`` can be copied.
        compare: capture in full too, and raise if the two differ in anything.
        options: see ``trace_step``.

    Raises:
        CaptureError: see ``trace_step``.
        StampingError: ``compare`` found a difference.
    """
    trace = trace_step(fn, **options)

    def capture(*args: Any, **kwargs: Any) -> CopiedCapture:
        begin = time.process_time()
        with copied_calls() as counts:
            step = trace(*args, **kwargs)
        seconds = time.process_time() - begin
        if compare:
            differences = step_differences(step, trace(*args, **kwargs))
            if differences:
                raise StampingError(
                    "the capture with copied calls differs from the full one:\n  "
                    + "\n  ".join(differences)
                )
        return CopiedCapture(
            step=step,
            report=CopyReport(
                num_calls=counts.num_calls,
                num_copied=counts.num_copied,
                compared=compare,
                trace_seconds=seconds,
            ),
        )

    return capture
