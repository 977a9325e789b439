"""Memory over a step is that of its peak, at few moments."""

from __future__ import annotations

import pytest

from gt_trainer.dry_run.memory_over_step import HeldAt, thinned


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
