"""Draw a schedule: as text for a terminal, or as one HTML file."""

from __future__ import annotations

from typing import Literal, get_args

from gt_pipeline.schedules.costs import UNIT_COSTS, CostModel
from gt_pipeline.schedules.schedule import LoweredSchedule, Schedule
from gt_pipeline.schedules.simulation import ScheduleTimeline, simulate
from gt_pipeline.schedules.timeline_page import timelines_page
from gt_pipeline.schedules.timeline_text import timeline_text

DrawingForm = Literal["text", "html"]


def draw(
    *schedules: Schedule | LoweredSchedule | ScheduleTimeline,
    form: DrawingForm = "text",
    costs: CostModel = UNIT_COSTS,
    width: int = 120,
) -> str:
    """Draw schedules below each other, as they would run at given costs.

    ::

        print(draw(schedule_of("1F1B", num_ranks=4, num_stages=4, num_microbatches=8)))
        Path("schedules.html").write_text(draw(one, another, form="html"))

    Args:
        *schedules: lowered (what is in its lists is drawn), not lowered, or simulated already.
        form: text, or an HTML document that needs no network.
        costs: of every action, for what is not simulated already.
        width: of a line of text, in characters.

    Raises:
        ScheduleError: a schedule cannot run, or ``width`` is too small.
        ValueError: there is no such form.
    """
    if form not in (forms := get_args(DrawingForm)):
        raise ValueError(f"form is {form!r}; allowed: {' or '.join(map(repr, forms))}")
    timelines = [
        each if isinstance(each, ScheduleTimeline) else simulate(each, costs) for each in schedules
    ]
    if form == "html":
        return timelines_page(timelines)
    return "\n".join(timeline_text(each, width=width) for each in timelines)
