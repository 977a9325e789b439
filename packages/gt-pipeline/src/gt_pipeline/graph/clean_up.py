"""What every recipe begins with, before a graph is cut."""

from __future__ import annotations

from gt_passes import (
    CanonicalizeViews,
    MergeWaits,
    PassContext,
    PassManager,
    RemoveDeadCode,
    ShareAllGathers,
)
from gt_trace import TracedStep


def clean_up(traced: TracedStep, *, verify: bool) -> None:
    """Tidy a captured graph, in place.

    A value that nobody reads would be saved, a wait for a wait cut off from the first, and a view
    that only was in the way of a parameter's gathering taken for a microbatch's own.
    """
    static_inputs = traced.inputs[: traced.num_static_inputs]
    context = PassContext(
        fake_mode=traced.fake_mode, static_input_names=tuple(each.name for each in static_inputs)
    )
    passes = [RemoveDeadCode(), MergeWaits(), CanonicalizeViews(), ShareAllGathers()]
    PassManager(passes, context=context, verify=verify).run(traced.graph_module)
