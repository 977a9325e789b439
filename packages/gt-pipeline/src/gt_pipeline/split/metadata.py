"""How many stages a pipeline has, from its schedule, its ranks and the model's layers.

The arithmetic is that of torchtitan's core (torchtitan/distributed/pipeline_parallel.py), free of
its configuration classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from gt_pipeline.errors import StageLayoutError
from gt_pipeline.schedules.schedule_rules import ScheduleStyle
from gt_pipeline.split.lower_bounds import too_small
from gt_pipeline.split.schedule_layout import ScheduleLayout, find_schedule_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineMetadata:
    """The numbers that the stages of a pipeline follow from.

    Attributes:
        num_layers: layers of the model.
        num_stages: virtual stages of the whole pipeline.
        pp_degree: pipeline ranks.
        stages_per_rank: ``num_stages / pp_degree``.
        style: which stages a rank has.
        input_weight: layers that what stands before the first layer counts as.
        output_weight: layers that what stands after the last layer counts as.
    """

    num_layers: int
    num_stages: int
    pp_degree: int
    stages_per_rank: int
    style: ScheduleStyle
    input_weight: int
    output_weight: int


def pipeline_metadata(
    num_layers: int,
    *,
    schedule: str | ScheduleLayout,
    pp_degree: int,
    layers_per_stage: int | None = None,
    input_weight: int = 1,
    output_weight: int = 1,
) -> PipelineMetadata:
    """How many stages there are.

    Args:
        num_layers: layers of the model.
        schedule: name of a PyTorch schedule, or the layout of another one.
        pp_degree: pipeline ranks.
        layers_per_stage: at most this many on a stage, weights counted; as few stages as the
            schedule allows if None.
        input_weight: layers that what stands before the first layer counts as.
        output_weight: layers that what stands after the last layer counts as.

    Raises:
        StageLayoutError: the numbers do not fit together. Every reason is listed.
    """
    layout = find_schedule_layout(schedule) if isinstance(schedule, str) else schedule
    what = f"{num_layers} layers on {pp_degree} pipeline ranks"
    if isinstance(schedule, str):
        what += f" by {schedule}"
    problems = too_small(
        1, num_layers=num_layers, pp_degree=pp_degree, layers_per_stage=layers_per_stage
    )
    problems += too_small(0, input_weight=input_weight, output_weight=output_weight)
    if problems:
        raise StageLayoutError(what=what, problems=problems)

    num_effective_layers = num_layers + input_weight + output_weight
    if layers_per_stage is None:
        num_stages = pp_degree * layout.min_stages_per_rank
    else:
        num_stages = -(-num_effective_layers // layers_per_stage)
        problems = _stage_count_problems(num_stages, pp_degree, layout)
    if problems:
        fitting = [
            str(candidate)
            for candidate in range(1, num_effective_layers + 1)
            if not _stage_count_problems(-(-num_effective_layers // candidate), pp_degree, layout)
        ]
        problems.append(
            f"layers_per_stage that fit: {', '.join(fitting) or 'none'} "
            f"({num_effective_layers} layers with input_weight={input_weight} and "
            f"output_weight={output_weight})"
        )
        raise StageLayoutError(
            what=f"{what}, layers_per_stage={layers_per_stage}", problems=problems
        )
    return PipelineMetadata(
        num_layers=num_layers,
        num_stages=num_stages,
        pp_degree=pp_degree,
        stages_per_rank=num_stages // pp_degree,
        style=layout.style,
        input_weight=input_weight,
        output_weight=output_weight,
    )


def _stage_count_problems(num_stages: int, pp_degree: int, layout: ScheduleLayout) -> list[str]:
    if num_stages % pp_degree:
        return [f"{num_stages} stages do not divide among {pp_degree} ranks"]
    stages_per_rank = num_stages // pp_degree
    most = layout.max_stages_per_rank
    if most is not None and stages_per_rank > most:
        of_them = "stage" if most == 1 else "stages"
        return [f"the schedule has at most {most} {of_them} on a rank, not {stages_per_rank}"]
    least = layout.min_stages_per_rank
    if stages_per_rank < least:
        return [f"the schedule has at least {least} stages on a rank, not {stages_per_rank}"]
    return []
