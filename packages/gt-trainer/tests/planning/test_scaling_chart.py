"""The scaling curve, drawn."""

from __future__ import annotations

import re

from planning.outcomes import scaling

from gt_trainer.planning.plan_page import scaling_chart


def test_what_is_simulated_stands_below_its_bound_and_what_is_missing_is_said():
    chart = scaling_chart(scaling())
    # The axis goes from 0 to 15,000 tokens a second.
    assert re.findall(r'<polyline class="([^"]+)" points="([^"]*)"', chart) == [
        ("growing bound", "0.00,14.67 100.00,78.67"),
        ("growing", "0.00,46.67"),
        ("fixed bound", "0.00,14.67"),
        ("fixed", "0.00,73.33"),
    ]
    assert [chart.count(f'class="dot {kind}"') for kind in ("growing", "fixed")] == [1, 1]
    assert "Nothing that fits was simulated in the time for: 256 (growing)." in chart
    assert "that is no search" in chart


def test_no_size_that_could_fit_is_said():
    (nothing,) = (each for each in scaling() if each.least_us is None)
    assert scaling_chart([nothing]) == "<p>No size has a recipe that could fit.</p>"
