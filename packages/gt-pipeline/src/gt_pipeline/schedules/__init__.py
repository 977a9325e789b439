"""Pipeline schedules as data: build, check, lower, simulate and draw them. Imports torch alone."""

from gt_pipeline.schedules.actions import Action, ActionKind, Direction, parse_action

__all__ = [
    "Action",
    "ActionKind",
    "Direction",
    "parse_action",
]
