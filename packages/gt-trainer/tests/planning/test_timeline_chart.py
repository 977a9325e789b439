"""A timeline is drawn row by row, with the kinds that are in it."""

from planning.outcomes import timeline

from gt_trainer.planning.plan_page import timeline_chart


def test_a_row_has_a_path_for_each_kind_at_its_place():
    drawn = timeline_chart(timeline(ms=1000.0))
    assert "<p>a step, on the ranks of a pipeline; from 0 to 1,000 ms.</p>" in drawn
    assert "<span>rank 0</span>" in drawn
    assert '<path fill="#3b7dd8" d="M0.00 0H40.00V1H0.00Z"/>' in drawn
    assert '<path fill="#3a9d5d" d="M50.00 0H90.00V1H50.00Z"/>' in drawn


def test_the_key_has_what_is_drawn_alone():
    drawn = timeline_chart(timeline(ms=1000.0))
    assert [word in drawn for word in ("forward</span>", "optimizer</span>")] == [True, True]
    assert "communication" not in drawn
