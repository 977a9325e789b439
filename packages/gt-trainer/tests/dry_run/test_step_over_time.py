"""Bars of a timeline are few, and cover what ran. Few moments have the peak of all."""

from __future__ import annotations

import pytest

from gt_trainer.dry_run.step_over_time import Bar, HeldAt, joined, thinned


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


def moments(*held: int) -> list[HeldAt]:
    return [HeldAt(start_us=float(at), held={"kind": each}) for at, each in enumerate(held)]


def test_the_fullest_of_each_part_of_the_time_is_kept():
    kept = list(thinned(moments(1, 5, 2, 3, 9, 4), 6.0, most=2))
    assert [(each.start_us, each.num_bytes) for each in kept] == [(0.0, 5), (3.0, 9)]


def test_few_moments_are_all_kept():
    few = moments(3, 1, 2)
    assert list(thinned(few, 3.0, most=100)) == few


def test_what_begins_at_the_end_is_in_the_last_part():
    late = [*moments(1, 2), HeldAt(start_us=4.0, held={"kind": 7})]
    assert [each.num_bytes for each in thinned(late, 4.0, most=4)] == [1, 2, 7]


@pytest.mark.parametrize("end_us", [0.0, 5.0])
def test_what_takes_no_time_is_one_moment(end_us: float):
    still = [HeldAt(start_us=0.0, held={"kind": each}) for each in (1, 3, 2)]
    assert [each.num_bytes for each in thinned(still, end_us)] == [3]
