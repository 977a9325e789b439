"""Drawings of schedules: as text, pinned; as a page, well formed and whole."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from schedule_cases import SLOW_MACHINES, named_schedules, natural_schedule, schedule_of_text

from gt_pipeline.errors import ScheduleError
from gt_pipeline.schedules import ActionCosts, Schedule, draw, lower, simulate


def test_1f1b_as_text() -> None:
    assert_expected_inline(
        draw(natural_schedule("1F1B", 4, 4)),
        """\
1F1B: 4 ranks, 4 stages, 4 microbatches; makespan 21, bubble 42.9%

rank 0 |0F0 0F1 0F2 0F3                         0B0----     0B1----     0B2----     0B3----
rank 1 |    1F0 1F1 1F2                 1B0---- 1F3 1B1----     1B2----     1B3----
rank 2 |        2F0 2F1         2B0---- 2F2 2B1---- 2F3 2B2----     2B3----
rank 3 |            3F0 3B0---- 3F1 3B1---- 3F2 3B2---- 3F3 3B3----

rank  computes  idle  idle within  live chunks
   0        12     9            9            4
   1        12     9            6            3
   2        12     9            3            2
   3        12     9            0            1
""",
    )


def test_zbv_as_text() -> None:
    assert_expected_inline(
        draw(natural_schedule("ZBVZeroBubble", 2, 4)),
        """\
ZBVZeroBubble: 2 ranks, 4 stages, 4 microbatches; makespan 25, bubble 4.0%

rank 0 |0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
rank 1 |    1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

rank  computes  idle  idle within  live chunks
   0        24     1            0            4
   1        24     1            0            4
""",
    )


def test_dualpipev_as_text_with_overlaps_that_gain_something() -> None:
    picture = draw(natural_schedule("DualPipeV", 2, 4), costs=ActionCosts(overlap_f_b=2.0))
    assert_expected_inline(
        picture,
        """\
DualPipeV: 2 ranks, 4 stages, 4 microbatches; makespan 22, bubble 4.5%

rank 0 |0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3&3B1     3F2&0B0 3B2---- 3F3&0B1 3B3---- 0I2 0W2 0I3 0W3
rank 1 |    1F0 2F0 1F1 2F1 1F2 2B0---- 2F2&1B0 1F3&2B1 2F3&1B1 2B2---- 1B2---- 2I3 1I3 2W3 1W3

rank  computes  idle  idle within  live chunks
   0        21     1            1            5
   1        21     1            0            5
""",
    )


def test_a_long_picture_goes_on_below_itself() -> None:
    assert_expected_inline(
        draw(natural_schedule("1F1B", 2, 4), width=48),
        """\
1F1B: 2 ranks, 2 stages, 4 microbatches; makespan 15, bubble 20.0%

        from 0
rank 0 |0F0 0F1         0B0---- 0F2 0B1---- 0F3
rank 1 |    1F0 1B0---- 1F1 1B1---- 1F2 1B2----

        from 10
rank 0 |0B2----     0B3----
rank 1 |1F3 1B3----

rank  computes  idle  idle within  live chunks
   0        12     3            3            2
   1        12     3            0            1
""",
    )


def test_several_schedules_stand_below_each_other() -> None:
    one, other = natural_schedule("GPipe", 2, 2), natural_schedule("1F1B", 2, 2)
    assert draw(one, other) == f"{draw(one)}\n{draw(other)}"


def test_what_was_simulated_is_drawn_as_it_is() -> None:
    schedule = natural_schedule("1F1B", 2, 4)
    costs = ActionCosts(forward=2.0, transfer=1.0)
    assert draw(simulate(schedule, costs)) == draw(schedule, costs=costs)


def test_costs_of_nothing_make_an_empty_but_right_picture() -> None:
    free = ActionCosts(forward=0.0, backward_input=0.0, backward_weight=0.0)
    assert "makespan 0, bubble 0.0%" in draw(natural_schedule("1F1B", 2, 4), costs=free)


def test_refuses_a_width_that_no_action_fits_into() -> None:
    with pytest.raises(ScheduleError) as caught:
        draw(natural_schedule("1F1B", 2, 4), width=10)
    assert_expected_inline(
        str(caught.value),
        """\
width is 10 characters:
  - it must be at least 12""",
    )


@SLOW_MACHINES
@given(named_schedules())
def test_text_names_every_action_at_its_time(schedule: Schedule) -> None:
    timeline = simulate(schedule)
    lines = draw(timeline, width=1_000_000).splitlines()
    rows = [line for line in lines if line.startswith("rank ") and "|" in line]
    assert len(rows) == schedule.num_ranks
    for row, actions in zip(rows, schedule.compute, strict=True):
        names = [name.rstrip("-") for name in row.split("|", 1)[1].split()]
        assert names == [
            str(each).strip("(").replace(";", "&").replace(")OVERLAP_F_B", "") for each in actions
        ]


class _Page(HTMLParser):
    """Counts what a page draws, and checks that its elements are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_draws_every_action_and_needs_no_network() -> None:
    schedule = natural_schedule("DualPipeV", 2, 4)
    lowered = lower(schedule, unshards=True, reduces=True)
    costs = ActionCosts(transfer=0.5, unshard=0.5, reduce_grad=0.5)
    text = draw(lowered, natural_schedule("1F1B", 2, 4), form="html", costs=costs)
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert text.count('<div class="timeline"') == 2
    assert page.count["table"] == 2
    bars = sum(
        max(1, len(each.compute_parts))
        for row in lowered.actions
        for each in row
        if each.kind != "RESHARD"
    )
    assert len(re.findall(r"<i [^>]* title=", text)) == bars + 16 + 8 * 2 * 2 // 2
    assert page.links == []
    assert "<script" not in text
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []


def test_names_of_schedules_are_escaped() -> None:
    schedule = schedule_of_text("0F0 0B0", stage_to_rank=(0,))
    renamed = Schedule(
        name="<b>&",
        num_microbatches=1,
        stage_to_rank=schedule.stage_to_rank,
        compute=schedule.compute,
    )
    assert "&lt;b&gt;&amp;: 1 ranks" in draw(renamed, form="html")


def test_a_mistyped_form_is_refused():
    with pytest.raises(ValueError, match="form is 'htlm'; allowed: 'text' or 'html'"):
        draw(form="htlm")  # type: ignore[arg-type]
