"""What the ``--parallelism.pipeline_parallel_*`` options mean: stages, ranks, order of actions.

Plain data from plain numbers, so that everything wrong with it is known in the launching process.
The meaning of the options is torchtitan's (torchtitan/distributed/pipeline_parallel.py, 0.3.0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchtitan.config import ParallelismConfig

from gt_pipeline.schedules import Schedule, peak_live, schedule_from_csv, schedule_of
from gt_pipeline.split import (
    TORCHTITAN_NAMING,
    find_schedule_layout,
    module_names_per_stage,
    pipeline_metadata,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """A pipeline before any stage exists."""

    schedule: Schedule
    names_per_stage: tuple[tuple[str, ...], ...]
    """Modules of the model, by their names in it, for each virtual stage."""

    @property
    def live_microbatches(self) -> int:
        """Of a stage, how many hold at once what their forwards saved; on the rank with most.

        A rank's stages share what is live there, about alike; rounded up. One number for all, so
        that equal stages are recomputed alike.
        """
        schedule = self.schedule
        return math.ceil(max(peak_live(schedule)) * schedule.num_ranks / schedule.num_stages)

    @property
    def num_microbatches(self) -> int:
        """Of a step."""
        return self.schedule.num_microbatches

    @property
    def stages_of_fullest_rank(self) -> int:
        """How many stages share a rank's memory, on the rank that has most."""
        schedule = self.schedule
        return max(len(schedule.stages_of_rank(rank)) for rank in range(schedule.num_ranks))

    def memory_share(self, stage: int) -> float:
        """What a stage may take of its rank's memory: an equal part for each that a rank has."""
        assert stage in range(self.schedule.num_stages)
        return 1 / self.stages_of_fullest_rank


def pipeline_plan(
    parallelism: ParallelismConfig, *, num_layers: int, local_batch_size: int
) -> PipelinePlan:
    """The pipeline that the options ask for.

    Args:
        parallelism: of the run; its pipeline degree is 2 or more.
        num_layers: of the model.
        local_batch_size: samples of one rank; the schedule runs as many microbatches as it holds.

    Raises:
        GtPipelineError: the options do not fit the model or one another; a ``ValueError``.
        FileNotFoundError: there is no such CSV file.
    """
    degree = parallelism.pipeline_parallel_degree
    num_microbatches = local_batch_size // parallelism.pipeline_parallel_microbatch_size
    csv_path = parallelism.pipeline_parallel_schedule_csv
    from_file = schedule_from_csv(csv_path) if csv_path else None
    names = parallelism.module_fqns_per_model_part
    if names is not None:
        names_per_stage = tuple(tuple(stage) for stage in names)
    else:
        input_weight = parallelism.pipeline_parallel_first_stage_less_layers
        output_weight = parallelism.pipeline_parallel_last_stage_less_layers
        if from_file is not None:
            num_stages = from_file.num_stages
        else:
            num_stages = pipeline_metadata(
                num_layers,
                schedule=parallelism.pipeline_parallel_schedule,
                pp_degree=degree,
                layers_per_stage=parallelism.pipeline_parallel_layers_per_stage,
                input_weight=input_weight,
                output_weight=output_weight,
            ).num_stages
        names_per_stage = module_names_per_stage(
            num_layers,
            num_stages=num_stages,
            naming=TORCHTITAN_NAMING,
            input_weight=input_weight,
            output_weight=output_weight,
        )
    schedule = from_file or schedule_of(
        parallelism.pipeline_parallel_schedule,
        num_ranks=degree,
        num_stages=len(names_per_stage),
        num_microbatches=num_microbatches,
    )
    return PipelinePlan(schedule=schedule, names_per_stage=names_per_stage)


def rank_with_loss(
    *, schedule: str, csv_path: str | None, pipeline_degree: int, world_size: int
) -> int:
    """The first rank that holds the last stage, where losses are computed; 0 without a pipeline.

    (torchtitan itself, 0.3.0, looks for the loss of a DualPipeV pipeline on its last rank, where
    the V has its middle.)

    Args:
        schedule: ``--parallelism.pipeline_parallel_schedule``.
        csv_path: of a schedule that replaces it, or None.
        pipeline_degree: number of pipeline ranks.
        world_size: of all ranks.
    """
    if pipeline_degree < 2:
        return 0
    if csv_path:
        pipeline_rank = schedule_from_csv(csv_path).stage_to_rank[-1]
    else:
        is_v = find_schedule_layout(schedule).style == "v"
        pipeline_rank = 0 if is_v else pipeline_degree - 1
    return ranks_of_pipelines(pipeline_degree, world_size)[0][pipeline_rank]


def ranks_of_pipelines(pipeline_degree: int, world_size: int) -> list[list[int]]:
    """The global ranks of each pipeline, in the order of its places.

    Pipeline ranks are the outermost axis of torchtitan's mesh.
    """
    return [
        list(range(first, world_size, world_size // pipeline_degree))
        for first in range(world_size // pipeline_degree)
    ]
