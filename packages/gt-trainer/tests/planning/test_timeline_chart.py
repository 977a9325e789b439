"""A timeline is drawn row by row, with the kinds that are in it."""

from planning.outcomes import timeline

from gt_trainer.planning.plan_page import timeline_chart


def test_a_row_has_a_bar_for_each_kind_at_its_place():
    drawn = timeline_chart(timeline(ms=1000.0))
    assert "<p>a step, on the ranks of a pipeline; from 0 to 1,000 ms.</p>" in drawn
    assert "<span>rank 0</span>" in drawn
    assert '<i class="forward" style="left:0.00%;width:40.00%"></i>' in drawn
    assert '<i class="backward" style="left:50.00%;width:40.00%"></i>' in drawn


def test_the_key_has_what_is_drawn_alone():
    drawn = timeline_chart(timeline(ms=1000.0))
    assert [word in drawn for word in ("forward</span>", "optimizer</span>")] == [True, True]
    assert "communication" not in drawn
