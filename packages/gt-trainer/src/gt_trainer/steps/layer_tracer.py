"""How the layers of a training step, or of a pipeline's stage, are traced: all, or most stamped.

``--compile.capture_layers`` says which; ``gt_trace.stamping`` proves that both give the same. Of
models that a solver placed, calls are copied in place of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gt_config import CaptureLayers
from gt_trace import TracedStep, trace_step
from gt_trace.stamping import (
    CopyReport,
    StampReport,
    makes_traced_calls,
    trace_step_by_copying,
    trace_step_by_stamping,
)

_KNOWN_FUNCTIONS = frozenset({"gt_trainer", "gt_passes", "torchtitan", "torchao"})
"""Packages whose autograd functions do in the backward what they keep says, layer by layer."""

_INITIALIZERS = frozenset({"_param_init"})
"""Where torchtitan's modules keep how to initialise them, which may depend on depth."""

_MIN_LAYERS = 12
"""From how many layers on stamping pays: below, the proofs take most of what it saves."""

CaptureLayersReport = StampReport | CopyReport
"""What became of a capture in which not everything was to be traced."""

Tracer = Callable[..., Callable[..., TracedStep]]
"""Takes the arguments of ``gt_trace.trace_step``, and gives what it gives."""


def layer_tracer(
    capture_layers: CaptureLayers,
    on_report: Callable[[CaptureLayersReport], None] = lambda report: None,
) -> Tracer:
    """What captures a function of a model by ``capture_layers``.

    Args:
        capture_layers: whether every layer is traced, or most are stamped. A placed model runs the
            calls of its plan and no layers: of equal calls all but one are copied.
        on_report: called after each capture in which not everything was to be traced.
    """
    if capture_layers == "full":
        return trace_step

    def trace(fn: Callable[..., Any], **options: Any) -> Callable[..., TracedStep]:
        in_full = trace_step(fn, **options)
        is_compared = capture_layers == "compared"
        if makes_traced_calls(options.get("module")):
            by_copying = trace_step_by_copying(fn, **options, compare=is_compared)

            def capture_calls(*args: Any, **kwargs: Any) -> TracedStep:
                captured = by_copying(*args, **kwargs)
                on_report(captured.report)
                return captured.step

            return capture_calls
        by_stamping = trace_step_by_stamping(
            fn,
            **options,
            ignored_attributes=_INITIALIZERS,
            known_functions=_KNOWN_FUNCTIONS,
            min_layers=_MIN_LAYERS if capture_layers == "auto" else 0,
            compare=is_compared,
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
