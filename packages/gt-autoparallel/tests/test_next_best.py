"""The next best layouts of all parameters: bounds that hold, and the price of the most promising."""

from __future__ import annotations

import math
from functools import cache

import pytest
from planned_models import plan, planner

from gt_autoparallel.errors import PlacementInputError
from gt_autoparallel.explanation import Explanation, explain_parameters
from gt_autoparallel.next_best import next_best_layouts
from gt_autoparallel.plan.plan_picture import drawn_layers
from gt_autoparallel.plan.report_page import report_page


@cache
def found() -> dict[str, Explanation]:
    return next_best_layouts(plan(), planner=planner())


@cache
def in_full() -> dict[str, Explanation]:
    return explain_parameters(plan(), planner=planner())


def test_bounds_of_all_layouts_hold() -> None:
    assert found().keys() == in_full().keys()
    for name, explanation in found().items():
        exact = {each.layout: each for each in in_full()[name].alternatives}
        assert {each.layout for each in explanation.alternatives} == exact.keys()
        for each in explanation.alternatives:
            assert each.at_least_us <= exact[each.layout].at_most_us + 1e-6
            assert bool(each.impossible) == bool(exact[each.layout].impossible)


def test_the_most_promising_layout_is_priced_and_is_the_next_best() -> None:
    for name, explanation in found().items():
        first = explanation.alternatives[0]
        assert first.is_exact
        best = in_full()[name].alternatives[0]
        assert first.at_most_us == pytest.approx(best.at_most_us, abs=1e-6)
        assert not any(each.is_exact for each in explanation.alternatives[1:])


def test_without_time_there_are_bounds() -> None:
    hurried = next_best_layouts(plan(), planner=planner(), time_limit_seconds=0.01)
    for name, explanation in hurried.items():
        for each in explanation.alternatives:
            exact = {other.layout: other for other in in_full()[name].alternatives}
            assert each.at_least_us <= exact[each.layout].at_most_us + 1e-6
            assert math.isinf(each.at_most_us)
    assert " us (a bound)\n" in str(hurried["layers.1.up.weight"])


def test_a_click_on_a_parameter_of_the_page_shows_its_next_best_layout() -> None:
    page = report_page(plan(), reasons=found())
    drawn = [each for layer in drawn_layers(plan()) for each in layer.parameters]
    assert page.count('<details class="why">') == len(drawn) < len(found())
    assert str(found()["layers.1.up.weight"]).splitlines()[0] in page
    assert "http" not in page.replace("http-equiv", "")


def test_something_that_is_no_plan_is_refused() -> None:
    with pytest.raises(PlacementInputError, match="next_best_layouts"):
        next_best_layouts("plan.json")  # type: ignore[arg-type]  # on purpose
