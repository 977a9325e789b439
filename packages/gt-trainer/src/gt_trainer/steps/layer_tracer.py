"""How the layers of a training step, or of a pipeline's stage, are traced: all, or most stamped.

``--compile.capture_layers`` says which; ``gt_trace.stamping`` proves that both give the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gt_config import CaptureLayers
from gt_trace import TracedStep, trace_step
from gt_trace.stamping import StampReport, trace_step_by_stamping

_KNOWN_FUNCTIONS = frozenset({"gt_trainer", "gt_passes", "torchtitan"})
"""Packages whose autograd functions do in the backward what they keep says, layer by layer."""

_INITIALIZERS = frozenset({"_param_init"})
"""Where torchtitan's modules keep how to initialise them, which may depend on depth."""

_MIN_LAYERS = 12
"""From how many layers on stamping pays: below, the proofs take most of what it saves."""

Tracer = Callable[..., Callable[..., TracedStep]]
"""Takes the arguments of ``gt_trace.trace_step``, and gives what it gives."""


def layer_tracer(
    capture_layers: CaptureLayers, on_report: Callable[[StampReport], None] = lambda report: None
) -> Tracer:
    """What captures a function of a model by ``capture_layers``.

    Args:
        capture_layers: whether every layer is traced, or most are stamped.
        on_report: called after each capture that was to be stamped.
    """
    if capture_layers == "full":
        return trace_step

    def trace(fn: Callable[..., Any], **options: Any) -> Callable[..., TracedStep]:
        in_full = trace_step(fn, **options)
        by_stamping = trace_step_by_stamping(
            fn,
            **options,
            ignored_attributes=_INITIALIZERS,
            known_functions=_KNOWN_FUNCTIONS,
            min_layers=_MIN_LAYERS if capture_layers == "auto" else 0,
            compare=capture_layers == "compared",
        )
        refused = False

        def capture(*args: Any, **kwargs: Any) -> TracedStep:
            nonlocal refused
            if refused:  # and the log has said why: a stage is traced twice
                return in_full(*args, **kwargs)
            captured = by_stamping(*args, **kwargs)
            refused = not captured.report.stamped
            on_report(captured.report)
            return captured.step

        return capture

    return trace
