"""What runs beside a task that takes a part of the device: every time here is worked by hand."""

from __future__ import annotations

import pytest

from gt_passes.simulation.beside import DeviceParts, Neighbours

HALF_OF_COMPUTE = DeviceParts(0.5, 0.0)
HALF_OF_MEMORY = DeviceParts(0.0, 0.5)
COMPUTE_BOUND = DeviceParts(4.0, 1.0)


def beside(*taken: tuple[float, float, DeviceParts]) -> Neighbours:
    neighbours = Neighbours()
    for start_us, end_us, parts in taken:
        neighbours.add("group", start_us, end_us, parts)
    return neighbours


def delay(
    neighbours: Neighbours,
    *,
    start: float = 0.0,
    alone: float = 4.0,
    needs: DeviceParts = COMPUTE_BOUND,
) -> float:
    return neighbours.delay_us("compute", start, alone, needs)


def test_half_of_the_multiprocessors_take_twice_as_long():
    assert delay(beside((0, 100, HALF_OF_COMPUTE))) == 4


def test_what_remains_when_the_collective_ends_is_done_at_full_speed():
    """Of 4 us 2 are done in the first 4, the others in 2 more."""
    assert delay(beside((0, 4, HALF_OF_COMPUTE))) == 2


def test_what_is_done_before_the_collective_begins_is_done_at_full_speed():
    """1 us is done before it, 1 of the other 3 in its 2 us, and 2 after it."""
    assert delay(beside((11, 13, HALF_OF_COMPUTE)), start=10) == 1


def test_a_collective_that_is_over_or_begins_later_slows_nothing():
    assert delay(beside((0, 10, HALF_OF_COMPUTE), (14, 20, HALF_OF_COMPUTE)), start=10) == 0


def test_what_waits_for_neither_part_takes_its_time():
    """2 us of 6 are the kernel's start and end."""
    assert delay(beside((0, 100, HALF_OF_COMPUTE)), alone=6) == 4


def test_bandwidth_that_is_not_used_can_be_taken():
    needs = DeviceParts(4.0, 2.0)
    assert delay(beside((0, 100, HALF_OF_MEMORY)), needs=needs) == 0
    assert delay(beside((0, 100, DeviceParts(0.0, 0.75))), needs=needs) == 4


def test_what_memory_bounds_needs_few_multiprocessors():
    needs = DeviceParts(1.0, 4.0)
    assert delay(beside((0, 100, HALF_OF_COMPUTE)), needs=needs) == 0
    assert delay(beside((0, 100, HALF_OF_MEMORY)), needs=needs) == 4


def test_of_several_at_once_each_part_is_the_largest():
    """In 4 us beside both 2 are done, in 1 beside one 0.75, and the other 1.25 alone."""
    taken = ((0, 4, HALF_OF_COMPUTE), (0, 5, DeviceParts(0.25, 0.5)))
    assert delay(beside(*taken), needs=DeviceParts(4.0, 2.0)) == 4 + 1 + 1.25 - 4


def test_every_task_of_a_stream_sees_what_still_runs():
    neighbours = beside((0, 12, HALF_OF_COMPUTE))
    assert [delay(neighbours, start=start) for start in (0, 8, 12)] == [4, 2, 0]
    neighbours.add("other group", 12, 16, HALF_OF_COMPUTE)
    assert delay(neighbours, start=12) == 2


def test_a_stream_is_not_slowed_by_its_own_tasks():
    neighbours = beside((0, 100, HALF_OF_COMPUTE))
    assert neighbours.delay_us("group", 0, 4, COMPUTE_BOUND) == 0


@pytest.mark.parametrize("taken", [(0, 0, HALF_OF_COMPUTE), (0, 100, DeviceParts(0.0, 0.0))])
def test_what_takes_no_time_or_nothing_slows_nothing(taken):
    assert delay(beside(taken)) == 0
