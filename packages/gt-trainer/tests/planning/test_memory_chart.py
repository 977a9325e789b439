"""Memory over a step, drawn."""

from __future__ import annotations

import re
from dataclasses import replace

from planning.outcomes import over_step

from gt_trainer.planning.plan_page import memory_chart

GIB = 2**30


def test_kinds_lie_on_top_of_each_other_under_the_limit_of_the_device():
    chart = memory_chart(over_step(40, ms=1000.0), capacity_bytes=80 * GIB)
    both, state = re.findall(r'<path class="[^"]+" d="([^"]+)"><title>([^<]+)<', chart)
    # The axis ends at 80 GiB and at 1,000 ms: 20 GiB for half of the time, then 40, then 20.
    assert both == (
        "M0 100H0.00V75.00H50.00V50.00H60.00V75.00H100.00V100Z",
        "activations: up to 30.00 GiB",
    )
    assert state == ("M0 100H0.00V87.50H100.00V100Z", "optimizer state: up to 10.00 GiB")
    assert '<line class="limit" x1="0.00" x2="100.00" y1="0.00" y2="0.00">' in chart
    assert "the step; dashed: the 80 GiB of a GPU." in chart


def test_kinds_that_nothing_is_held_for_are_not_in_the_key():
    chart = memory_chart(over_step(40, ms=1000.0), capacity_bytes=80 * GIB)
    assert re.findall(r'<i class="[^"]+"></i>([^<]+)<', chart) == [
        "optimizer state",
        "activations",
    ]


def test_kinds_without_a_colour_are_drawn_too():
    rising = over_step(40, ms=1000.0)
    moments = tuple(
        replace(each, held={**each.held, "other buffers": 4 * GIB}) for each in rising.moments
    )
    chart = memory_chart(replace(rising, moments=moments), capacity_bytes=80 * GIB)
    assert "other buffers: up to 4.00 GiB" in chart
    assert '<i class="other_buffers"></i>other buffers<' in chart
