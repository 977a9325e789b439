"""Which layers each stage of a pipeline has, as a run divides them by default."""

from __future__ import annotations

from gt_pipeline.split import (
    TORCHTITAN_NAMING,
    find_schedule_layout,
    module_names_per_stage,
    pipeline_metadata,
)
from gt_trainer.planning.model_counts import (
    ModelCounts,
    PipelineLayout,
    StageParts,
    whole_model,
)
from gt_trainer.planning.run_recipe import RunRecipe


class PipelineLayouts:
    """The layouts of one model, each made once.

    Args:
        model: the model.
    """

    def __init__(self, model: ModelCounts) -> None:
        self._model = model
        self._known: dict[tuple[str, int], PipelineLayout] = {}
        self._whole = whole_model(model)

    def of(self, recipe: RunRecipe) -> PipelineLayout:
        """The stages of a recipe.

        Raises:
            GtPipelineError: the model has too few layers for them.
        """
        if recipe.schedule is None:
            return self._whole
        key = recipe.schedule, recipe.pp
        if key not in self._known:
            self._known[key] = _layout(self._model, *key)
        return self._known[key]


def _layout(model: ModelCounts, schedule: str, pp: int) -> PipelineLayout:
    num_layers = len(model.layers)
    metadata = pipeline_metadata(num_layers, schedule=schedule, pp_degree=pp)
    names = module_names_per_stage(
        num_layers, num_stages=metadata.num_stages, naming=TORCHTITAN_NAMING
    )
    stages, begin = [], 0
    for index, modules in enumerate(names):
        end = begin + sum(name.startswith("layers.") for name in modules)
        stages.append(
            StageParts.of(
                model,
                range(begin, end),
                has_embedding=index == 0,
                has_output=index == metadata.num_stages - 1,
            )
        )
        begin = end
    is_v = find_schedule_layout(schedule).style == "v"
    ranks = [*range(pp), *reversed(range(pp))] if is_v else [*range(pp)] * metadata.stages_per_rank
    by_rank = [tuple(stage for stage, of in enumerate(ranks) if of == rank) for rank in range(pp)]
    return PipelineLayout(stages=tuple(stages), by_rank=tuple(by_rank))
