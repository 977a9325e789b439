"""Traces of spans: complete, with arrows between sends and receives and a count of live chunks."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from schedule_cases import SLOW_MACHINES, any_schedules, schedule_of_text

from gt_pipeline.schedules import (
    ActionCosts,
    Schedule,
    lower,
    peak_live,
    simulate,
    write_chrome_trace,
)
from gt_pipeline.schedules.actions import parse_action
from gt_pipeline.schedules.chrome_trace import chrome_trace
from gt_pipeline.schedules.rank_lists import Span

_COSTS = ActionCosts(forward=2.0, transfer=0.5)


def test_durations_are_those_of_the_spans_in_microseconds() -> None:
    schedule = schedule_of_text("0F0 0B0", "1F0 1B0", stage_to_rank=(0, 1))
    trace = chrome_trace(simulate(schedule, _COSTS).spans, unit_us=1000.0)
    complete = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    assert [
        (each["pid"], each["tid"], each["name"], each["ts"], each["dur"]) for each in complete
    ] == [
        (0, 0, "0F0", 0.0, 2000.0),
        (0, 1, "0SEND_F0", 2000.0, 500.0),
        (0, 1, "0RECV_B0", 6500.0, 500.0),
        (0, 0, "0B0", 7000.0, 2000.0),
        (1, 1, "1RECV_F0", 2000.0, 500.0),
        (1, 0, "1F0", 2500.0, 2000.0),
        (1, 0, "1B0", 4500.0, 2000.0),
        (1, 1, "1SEND_B0", 6500.0, 500.0),
    ]
    assert complete[0]["args"] == {"stage": 0, "microbatch": 0}
    assert complete[0]["cat"] == "forward"


def test_ranks_and_lanes_have_names() -> None:
    schedule = schedule_of_text("0F0", stage_to_rank=(0,))
    trace = chrome_trace(simulate(schedule).spans)
    names = [each["args"]["name"] for each in trace["traceEvents"] if each["ph"] == "M"]
    assert names == ["rank 0", "compute", "transfer", "collective"]


@SLOW_MACHINES
@given(any_schedules(max_ranks=4))
def test_every_transfer_has_an_arrow_and_the_counter_ends_at_zero(schedule: Schedule) -> None:
    lowered = lower(schedule, unshards=True, reduces=True)
    trace = chrome_trace(simulate(lowered, _COSTS).spans)
    events = trace["traceEvents"]
    num_sends = sum(each.is_send for row in lowered.actions for each in row)
    starts = {each["id"]: each for each in events if each["ph"] == "s"}
    ends = {each["id"]: each for each in events if each["ph"] == "f"}
    assert len(starts) == num_sends
    assert starts.keys() == ends.keys()
    assert all(starts[each]["pid"] != ends[each]["pid"] for each in starts)
    for rank, peak in enumerate(peak_live(schedule)):
        counts = [
            each["args"]["chunks"] for each in events if each["ph"] == "C" and each["pid"] == rank
        ]
        assert counts[-1] == 0
        assert 0 <= max(counts) <= peak


def test_what_one_rank_measured_is_a_trace_too() -> None:
    """Its receives have no sends beside them, so they have no arrows."""
    spans = [
        Span(rank=1, lane="transfer", action=parse_action("1RECV_F0"), start=10.0, end=12.5),
        Span(rank=1, lane="compute", action=parse_action("1F0"), start=12.5, end=99.0),
    ]
    events = chrome_trace(spans)["traceEvents"]
    assert {each["ph"] for each in events} == {"M", "X", "C"}
    assert [each["dur"] for each in events if each["ph"] == "X"] == [2.5, 86.5]


def test_it_is_written_as_json(tmp_path: Path) -> None:
    schedule = schedule_of_text("0F0 0B0", stage_to_rank=(0,))
    path = tmp_path / "traces" / "schedule.json"
    spans = simulate(schedule).spans
    write_chrome_trace(spans, path)
    assert json.loads(path.read_text()) == chrome_trace(spans)
