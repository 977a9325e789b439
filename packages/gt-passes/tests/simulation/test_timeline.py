"""Schedules drawn: one character is one microsecond, `.` is a stream that stands still."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gt_passes.simulation import schedule
from gt_passes.simulation.beside import DeviceParts
from gt_passes.simulation.timeline import Task, TaskOrderError, Timeline


def task(name: str, stream: str, duration: float, *waits_for: int, **options: object) -> Task:
    return Task(name=name, stream=stream, duration_us=duration, waits_for=waits_for, **options)


def drawing(timeline: Timeline) -> str:
    """One line a stream; a task is its first letter as often as it takes microseconds."""
    lines = {}
    for position, done in enumerate(timeline.tasks):
        line = lines.setdefault(done.stream, "")
        line += "." * (round(timeline.start_us[position]) - len(line))
        duration_us = timeline.end_us[position] - timeline.start_us[position]
        lines[done.stream] = line + done.name[0] * round(duration_us)
    return "\n".join(f"{stream:8}{line}" for stream, line in lines.items())


def test_can_hide_communication_behind_computation():
    """
    compute aaabbbbcc
    network    GGG
    """
    timeline = schedule(
        [
            task("a", "compute", 3),
            task("G", "network", 3, 0),
            task("b", "compute", 4),
            task("wait", "compute", 0, 1),
            task("c", "compute", 2),
        ]
    )
    assert drawing(timeline) == "compute aaabbbbcc\nnetwork ...GGG"
    assert timeline.stalled_us("compute") == 0
    assert timeline.makespan_us == 9


def test_cannot_hide_communication_that_is_waited_for_at_once():
    """
    compute aaa...bbbbcc
    network    GGG
    """
    timeline = schedule(
        [
            task("a", "compute", 3),
            task("G", "network", 3, 0),
            task("wait", "compute", 0, 1),
            task("b", "compute", 4),
            task("c", "compute", 2),
        ]
    )
    # A wait takes no time, so its place is drawn by what follows.
    assert drawing(timeline) == "compute aaa...bbbbcc\nnetwork ...GGG"
    (stall,) = [stall for stall in timeline.stalls if stall.stream == "compute"]
    assert (stall.waiting, stall.waited_for, stall.duration_us) == (2, 1, 3)


def test_can_hide_part_of_a_communication():
    """
    compute aaabb..c
    network    GGGG
    """
    timeline = schedule(
        [
            task("a", "compute", 3),
            task("G", "network", 4, 0),
            task("b", "compute", 2),
            task("wait", "compute", 0, 1),
            task("c", "compute", 1),
        ]
    )
    assert drawing(timeline) == "compute aaabb..c\nnetwork ...GGGG"
    assert timeline.stalled_us("compute") == 2


def test_cannot_run_two_collectives_of_one_group_at_once():
    """
    compute a....b
    group    GGHH
    """
    timeline = schedule(
        [
            task("a", "compute", 1),
            task("G", "group", 2, 0),
            task("H", "group", 2, 0),
            task("wait", "compute", 0, 2),
            task("b", "compute", 1),
        ]
    )
    assert drawing(timeline) == "compute a....b\ngroup   .GGHH"


def test_can_run_collectives_of_two_groups_at_once():
    """
    compute a..b
    first    GG
    second   HH
    """
    timeline = schedule(
        [
            task("a", "compute", 1),
            task("G", "first", 2, 0),
            task("H", "second", 2, 0),
            task("wait", "compute", 0, 1, 2),
            task("b", "compute", 1),
        ]
    )
    assert drawing(timeline) == "compute a..b\nfirst   .GG\nsecond  .HH"


def test_the_stall_is_charged_to_the_task_that_ends_last():
    timeline = schedule(
        [
            task("G", "first", 2),
            task("H", "second", 5),
            task("wait", "compute", 0, 0, 1),
        ]
    )
    (stall,) = timeline.stalls
    assert timeline.tasks[stall.waited_for].name == "H"


def test_a_collective_slows_down_what_runs_beside_it():
    """Of 4 us of `b` 2 are done in the 4 beside `G`, which has half of the multiprocessors.

    compute aabbbbbbcc
    group     GGGG
    """
    needs, takes = DeviceParts(4.0, 0.0), DeviceParts(0.5, 0.0)
    timeline = schedule(
        [
            task("a", "compute", 2),
            task("G", "group", 4, 0, takes=takes),
            task("b", "compute", 4, needs=needs),
            task("wait", "compute", 0, 1),
            task("c", "compute", 2, needs=DeviceParts(2.0, 0.0)),
        ]
    )
    assert drawing(timeline) == "compute aabbbbbbcc\ngroup   ..GGGG"
    assert (timeline.busy_us("compute"), timeline.busy_us("group")) == (10, 4)
    assert timeline.slowed_us == {"compute": 2}


def test_a_slow_host_starves_the_device():
    """Each launch takes 3 us and each task 1: the stream stands still 2 us before each."""
    tasks = [task(name, "compute", 1, host_us=3.0) for name in "abc"]
    timeline = schedule(tasks)
    assert drawing(timeline) == "compute ...a..b..c"
    assert timeline.host_idle_us["compute"] == 3 + 2 + 2


def test_a_host_that_is_ahead_costs_nothing():
    tasks = [task(name, "compute", 4, host_us=1.0) for name in "abc"]
    assert drawing(schedule(tasks)) == "compute .aaaabbbbcccc"


def test_a_launch_reaches_an_idle_device_later():
    timeline = schedule([task("a", "compute", 2, host_us=1.0)], launch_latency_us=3)
    assert timeline.start_us == (4,)


def test_a_host_that_waits_issues_nothing_meanwhile():
    """The host reads a number: it waits for `a`, then needs 2 us for the round trip, 1 to issue.

    compute .aaaaaa...b
    """
    timeline = schedule(
        [
            task("a", "compute", 6, host_us=1.0),
            task("read", "compute", 0, blocks_host=True),
            task("b", "compute", 1, host_us=1.0),
        ],
        sync_us=2,
    )
    assert drawing(timeline) == "compute .aaaaaa...b"


def test_a_second_number_costs_no_second_round_trip():
    tasks = [task("a", "compute", 6)]
    tasks += [task("read", "compute", 0, blocks_host=True) for _ in range(3)]
    assert schedule(tasks, sync_us=2).host_end_us == 8


def test_every_task_that_waits_for_the_future_is_named():
    with pytest.raises(TaskOrderError) as caught:
        schedule([task("a", "s", 1, 0), task("b", "s", 1, 2), task("c", "s", 1, -1)])
    assert str(caught.value).splitlines() == [
        "tasks may wait for those issued before them only:",
        "  task 0 (a) waits for task 0",
        "  task 1 (b) waits for task 2",
        "  task 2 (c) waits for task -1",
    ]


def test_nothing_takes_no_time():
    assert schedule([]).makespan_us == 0


@st.composite
def programs(draw: st.DrawFn, *, share: bool = True) -> list[Task]:
    times = st.integers(0, 20)
    parts = st.none() | st.sampled_from([DeviceParts(0.5, 0.0), DeviceParts(0.25, 0.5)])
    tasks: list[Task] = []
    for position in range(draw(st.integers(1, 30))):
        earlier = st.integers(0, position - 1) if position else st.nothing()
        duration = draw(times)
        stream = draw(st.sampled_from(["compute", "first", "second"]))
        is_computing = stream == "compute"
        needs = DeviceParts(duration, duration / 2) if share and is_computing else None
        tasks.append(
            Task(
                name=f"t{position}",
                stream=stream,
                duration_us=duration,
                waits_for=tuple(draw(st.lists(earlier, max_size=3))) if position else (),
                host_us=draw(times),
                blocks_host=draw(st.booleans()),
                needs=needs,
                takes=draw(parts) if share and not is_computing else None,
            )
        )
    return tasks


@given(programs(), st.integers(0, 5), st.integers(0, 5))
def test_the_time_of_every_stream_is_accounted_for(tasks, launch_latency, sync):
    timeline = schedule(tasks, launch_latency_us=launch_latency, sync_us=sync)
    for stream in {done.stream for done in tasks}:
        ends = [
            end for done, end in zip(tasks, timeline.end_us, strict=True) if done.stream == stream
        ]
        accounted = timeline.busy_us(stream) + timeline.stalled_us(stream)
        accounted += timeline.host_idle_us.get(stream, 0)
        assert max(ends) == pytest.approx(accounted)


@given(programs())
def test_no_task_starts_before_what_it_waits_for_is_over(tasks):
    timeline = schedule(tasks)
    last: dict[str, int] = {}
    for position, done in enumerate(tasks):
        before = [*done.waits_for, *([last[done.stream]] if done.stream in last else [])]
        assert all(timeline.end_us[other] <= timeline.start_us[position] for other in before)
        last[done.stream] = position


@given(programs())
def test_neighbours_make_nothing_end_earlier(tasks):
    """So a bound of the time of tasks on their own bounds theirs."""
    alone = schedule([replace(each, takes=None) for each in tasks])
    ends = zip(alone.end_us, schedule(tasks).end_us, strict=True)
    assert all(before <= after for before, after in ends)


@given(programs(share=False), st.integers(0, 29))
def test_a_faster_task_never_makes_the_whole_slower(tasks, which):
    which %= len(tasks)
    faster = [*tasks]
    faster[which] = replace(tasks[which], duration_us=tasks[which].duration_us / 2)
    assert schedule(faster).makespan_us <= schedule(tasks).makespan_us
