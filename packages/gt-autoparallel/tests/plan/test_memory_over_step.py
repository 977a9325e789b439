"""Memory over a step rises through the forward and falls through the backward, to what stays."""

from __future__ import annotations

from plan_doubles import FSDP, TENSOR_PARALLEL, plan_by_hand
from planned_models import plan

from gt_autoparallel.plan.memory_over_step import memory_over_step
from gt_autoparallel.plan.report_page import report_page


def test_saved_values_grow_to_what_the_plan_counts_and_are_all_given_back() -> None:
    found = plan()
    moments = memory_over_step(found)
    windows = [each.window for each in moments]
    forward = [each for each in windows if each.endswith(" forward")]
    assert windows[: len(forward)] == forward
    assert all(each.endswith(" backward") for each in windows[len(forward) :])
    saved = [each.parts["saved activations"] for each in moments]
    peak = found.memory.saved_activations
    assert peak > 0
    assert max(saved) == saved[len(forward) - 1] == peak
    assert saved[: len(forward)] == sorted(saved[: len(forward)])
    assert saved[len(forward) :] == sorted(saved[len(forward) :], reverse=True)
    assert saved[-1] < peak
    assert max(each.total for each in moments) <= found.memory.total


def test_the_page_has_a_column_for_each_moment() -> None:
    by_hand = plan_by_hand(("dp", 2, FSDP), ("tp", 2, TENSOR_PARALLEL))
    page = report_page(by_hand)
    for each in memory_over_step(by_hand):
        assert f'<div title="{each.window}: ' in page
