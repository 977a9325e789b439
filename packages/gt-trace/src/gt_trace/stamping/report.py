"""What became of one capture that was to be stamped, and why it was not."""

from __future__ import annotations

from dataclasses import dataclass

from gt_trace.capture.traced_step import TracedStep
from gt_trace.errors import CaptureError


@dataclass(frozen=True, slots=True, kw_only=True)
class StampReport:
    """Whether layers were stamped, and why not."""

    num_layers: int
    """How many layers the model's list of layers has; 0 if there is no list."""

    num_layers_traced: int
    refusal: str | None = None
    """Why the capture was made in full; None if layers were stamped."""

    period: int = 1
    """How many layers make one unit that was stamped."""

    compared: bool = False
    """Whether the full trace was made too, and found equal."""

    gate_seconds: float = 0.0
    """Processor time in which the layers were proven alike."""

    trace_seconds: float = 0.0
    """Processor time of the trace of the shortened model, or of the full one."""

    stamp_seconds: float = 0.0
    """Processor time of making the whole graph."""

    @property
    def stamped(self) -> bool:
        """Whether layers were stamped."""
        return self.refusal is None

    def __str__(self) -> str:
        """One line for a log."""
        if self.refusal is not None:
            return f"all {self.num_layers} layers traced: {self.refusal}"
        how = ", equal to the full trace" if self.compared else ""
        return (
            f"{self.num_layers_traced} of {self.num_layers} layers traced, the others stamped{how}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StampedCapture:
    """A captured step, complete in either case, and how it was made."""

    step: TracedStep
    report: StampReport


class NotStampable(Exception):  # noqa: N818  # an outcome, which no caller sees as an error
    """Stamping was given up; the text says why, and the capture is made in full."""


class ReachesTooFar(NotStampable):
    """A value is used further away than the traced layers show; one more of each side may do."""


class StampingError(CaptureError):
    """A stamped capture differs from the full one: a bug of ours. The text says in what."""
