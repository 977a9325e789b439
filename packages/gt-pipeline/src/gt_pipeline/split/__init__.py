"""Splitting a model into pipeline stages; imports torch, so that any trainer can take it.

::

    numbers = pipeline_metadata(32, schedule="Interleaved1F1B", pp_degree=4)
    names = module_names_per_stage(32, num_stages=numbers.num_stages, naming=TORCHTITAN_NAMING)
    check_splittable(model_on_meta, names, (tokens_on_meta,))
    mine = stage_indices_of_rank(pp_rank, 4, numbers.num_stages, style=numbers.style)
    stages = stage_modules(model, names, mine)
"""

from gt_pipeline.split.balanced_stages import module_names_by_cost
from gt_pipeline.split.cover import check_cover
from gt_pipeline.split.layer_naming import (
    HUGGING_FACE_NAMING,
    TORCHTITAN_NAMING,
    LayerNaming,
    find_naming,
)
from gt_pipeline.split.metadata import pipeline_metadata
from gt_pipeline.split.module_costs import measure_module_costs, parameter_bytes
from gt_pipeline.split.module_names import module_names_per_stage
from gt_pipeline.split.removal import RemovalPolicy
from gt_pipeline.split.schedule_layout import ScheduleLayout, find_schedule_layout
from gt_pipeline.split.shared_groups import SharedGroup
from gt_pipeline.split.split_module import split_module, stage_modules
from gt_pipeline.split.splittable import check_splittable
from gt_pipeline.split.stage_indices import stage_indices_of_rank

__all__ = [
    "HUGGING_FACE_NAMING",
    "TORCHTITAN_NAMING",
    "LayerNaming",
    "RemovalPolicy",
    "ScheduleLayout",
    "SharedGroup",
    "check_cover",
    "check_splittable",
    "find_naming",
    "find_schedule_layout",
    "measure_module_costs",
    "module_names_by_cost",
    "module_names_per_stage",
    "parameter_bytes",
    "pipeline_metadata",
    "split_module",
    "stage_indices_of_rank",
    "stage_modules",
]
