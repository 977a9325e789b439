"""Pipeline schedules as data: build, check, lower, simulate and draw them.

::

    schedule = schedule_of("DualPipeV", num_ranks=4, num_stages=8, num_microbatches=16)
    timeline = simulate(schedule, ActionCosts(overlap_f_b=2.5))
    print(timeline.makespan, timeline.bubble, timeline.peak_live)
    print(draw(timeline))
"""

from gt_pipeline.schedules.actions import Action
from gt_pipeline.schedules.build_schedule import build_pipeline_schedule, register_action_functions
from gt_pipeline.schedules.chrome_trace import write_chrome_trace
from gt_pipeline.schedules.costs import ActionCosts
from gt_pipeline.schedules.deferred_weights import limit_deferred_weights
from gt_pipeline.schedules.draw_schedule import draw
from gt_pipeline.schedules.liveness import peak_live
from gt_pipeline.schedules.lowering import lower
from gt_pipeline.schedules.named_schedules import schedule_of
from gt_pipeline.schedules.schedule import Schedule
from gt_pipeline.schedules.schedule_checks import check_schedule
from gt_pipeline.schedules.schedule_csv import schedule_from_csv, schedule_to_csv
from gt_pipeline.schedules.schedule_rules import SCHEDULE_NAMES
from gt_pipeline.schedules.simulation import ScheduleTimeline, simulate

__all__ = [
    "SCHEDULE_NAMES",
    "Action",
    "ActionCosts",
    "Schedule",
    "ScheduleTimeline",
    "build_pipeline_schedule",
    "check_schedule",
    "draw",
    "limit_deferred_weights",
    "lower",
    "peak_live",
    "register_action_functions",
    "schedule_from_csv",
    "schedule_of",
    "schedule_to_csv",
    "simulate",
    "write_chrome_trace",
]
