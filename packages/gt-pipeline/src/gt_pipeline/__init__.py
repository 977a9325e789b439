"""Pipeline parallelism: split any model into stages, build and study schedules, run stage graphs.

Most used names are here, with every error; the rest is in the subpackages. `gt_pipeline.split`,
`gt_pipeline.schedules` and `gt_pipeline.runner` need torch alone. `gt_pipeline.graph` (stages
captured as graphs) needs what the extra `gt-pipeline[graph]` brings, and is imported by that name,
never from here.
"""

from gt_pipeline.errors import (
    ActionError,
    GtPipelineError,
    MicrobatchError,
    NotSplittableError,
    PipelineStepError,
    RunnerClosedError,
    RunnerSetupError,
    ScheduleError,
    StageCaptureError,
    StageCutError,
    StageGraphError,
    StageInputError,
    StageLayoutError,
    StageNamesError,
    StageOrderError,
    StageOutputError,
    TiedParametersError,
)
from gt_pipeline.schedules import (
    Schedule,
    build_pipeline_schedule,
    draw,
    peak_live,
    schedule_of,
    simulate,
)
from gt_pipeline.split import (
    LayerNaming,
    RemovalPolicy,
    SharedGroup,
    check_cover,
    check_splittable,
    module_names_by_cost,
    module_names_per_stage,
    pipeline_metadata,
    split_module,
    stage_indices_of_rank,
    stage_modules,
)

__all__ = [
    "ActionError",
    "GtPipelineError",
    "LayerNaming",
    "MicrobatchError",
    "NotSplittableError",
    "PipelineStepError",
    "RemovalPolicy",
    "RunnerClosedError",
    "RunnerSetupError",
    "Schedule",
    "ScheduleError",
    "SharedGroup",
    "StageCaptureError",
    "StageCutError",
    "StageGraphError",
    "StageInputError",
    "StageLayoutError",
    "StageNamesError",
    "StageOrderError",
    "StageOutputError",
    "TiedParametersError",
    "__version__",
    "build_pipeline_schedule",
    "check_cover",
    "check_splittable",
    "draw",
    "module_names_by_cost",
    "module_names_per_stage",
    "peak_live",
    "pipeline_metadata",
    "schedule_of",
    "simulate",
    "split_module",
    "stage_indices_of_rank",
    "stage_modules",
]

__version__ = "0.1.0"
