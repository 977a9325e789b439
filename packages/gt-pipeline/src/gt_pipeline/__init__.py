"""Pipeline parallelism: split any model into stages, build and study schedules, run stage graphs.

`gt_pipeline.split`, `gt_pipeline.schedules` and `gt_pipeline.runner` need torch alone.
`gt_pipeline.graph` (stages captured as graphs) needs what the extra `gt-pipeline[graph]` brings,
and is imported by that name, never from here.
"""

from gt_pipeline.errors import (
    ActionError,
    GtPipelineError,
    NotSplittableError,
    ScheduleError,
    StageLayoutError,
    StageNamesError,
    TiedParametersError,
)
from gt_pipeline.schedules import Action, ActionKind, Direction, parse_action

__all__ = [
    "Action",
    "ActionError",
    "ActionKind",
    "Direction",
    "GtPipelineError",
    "NotSplittableError",
    "ScheduleError",
    "StageLayoutError",
    "StageNamesError",
    "TiedParametersError",
    "__version__",
    "parse_action",
]

__version__ = "0.1.0"
