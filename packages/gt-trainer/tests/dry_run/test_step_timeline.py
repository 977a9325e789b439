"""Bars of a timeline are few, and cover what ran."""

from __future__ import annotations

from gt_trainer.dry_run.step_timeline import Bar, joined


def bar(start_us: float, end_us: float, kind: str = "forward") -> Bar:
    return Bar(start_us=start_us, end_us=end_us, kind=kind)


def test_bars_with_a_short_pause_between_them_are_one():
    assert list(joined([bar(5, 9), bar(0, 4)], 1.0)) == [bar(0, 9)]


def test_a_pause_that_can_be_seen_stays():
    assert list(joined([bar(0, 4), bar(5.5, 9)], 1.0)) == [bar(0, 4), bar(5.5, 9)]


def test_kinds_stay_apart_and_what_takes_no_time_is_left_out():
    bars = [bar(0, 4), bar(4, 6, "backward"), bar(6, 6), bar(6, 8)]
    assert list(joined(bars, 1.0)) == [bar(4, 6, "backward"), bar(0, 4), bar(6, 8)]


def test_a_bar_inside_another_does_not_end_it():
    assert list(joined([bar(0, 9), bar(1, 2), bar(9, 10)], 0.0)) == [bar(0, 10)]
