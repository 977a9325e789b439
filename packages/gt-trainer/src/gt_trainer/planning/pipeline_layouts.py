"""Which layers each stage of a pipeline has, as a run divides them by default."""

from __future__ import annotations

import functools

from gt_pipeline.split import (
    TORCHTITAN_NAMING,
    find_schedule_layout,
    module_names_per_stage,
    pipeline_metadata,
)
from gt_trainer.planning.model_counts import PipelineLayout, StageParts


@functools.cache
def pipeline_layout(schedule: str, pp: int, num_layers: int) -> PipelineLayout:
    """The stages of a pipeline.

    Args:
        schedule: its name.
        pp: pipeline ranks, 2 or more.
        num_layers: of the model.

    Raises:
        GtPipelineError: the numbers do not fit together.
    """
    metadata = pipeline_metadata(num_layers, schedule=schedule, pp_degree=pp)
    names = module_names_per_stage(
        num_layers, num_stages=metadata.num_stages, naming=TORCHTITAN_NAMING
    )
    stages, begin = [], 0
    for index, modules in enumerate(names):
        end = begin + sum(name.startswith("layers.") for name in modules)
        stages.append(
            StageParts(
                layers=range(begin, end),
                has_embedding=index == 0,
                has_output=index == metadata.num_stages - 1,
            )
        )
        begin = end
    is_v = find_schedule_layout(schedule).style == "v"
    ranks = [*range(pp), *reversed(range(pp))] if is_v else [*range(pp)] * metadata.stages_per_rank
    return PipelineLayout(stages=tuple(stages), rank_of_stage=tuple(ranks))
