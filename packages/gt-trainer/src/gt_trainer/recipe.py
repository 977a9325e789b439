"""From the user's ``--compile.*`` options to the passes of a captured graph."""

from __future__ import annotations

from gt_config import CompileConfig
from gt_passes import PassContext, PassPipeline, default_recipe
from gt_trainer.captured_step import Recipe

__all__ = ["recipe_of"]


def recipe_of(options: CompileConfig) -> Recipe:
    """The recipe that ``options`` ask for; it reads nothing else of the configuration."""

    def build(context: PassContext) -> PassPipeline:
        return default_recipe(options, context=context)

    return build
