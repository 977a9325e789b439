"""From the user's ``--compile.*`` options to the passes of a captured graph.

The native recipe (``gt_passes.default_recipe``), or that of the backend of planned steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from gt_config import CompileConfig
from gt_passes import (
    PassContext,
    PassPipeline,
    SubgraphCompiler,
    declare_pure_operator,
    default_recipe,
)
from gt_trainer.decoder.attention import flex_attention_options
from gt_trainer.steps.captured_step import Recipe

ReshardChoice = Literal["default", "always", "never"]
"""torchtitan's ``--parallelism.fsdp_reshard_after_forward``."""

_RESHARD: dict[ReshardChoice, bool | None] = {
    "default": None,  # as the memory policy says
    "always": True,
    "never": False,
}

# torchtitan's expert-parallel combine (torchtitan/ops/scatter_add.py) is a sum in a fixed order.
declare_pure_operator("torchtitan::deterministic_scatter_add")


def recipe_of(
    options: CompileConfig,
    *,
    reshard_after_forward: ReshardChoice = "default",
    only: Collection[str] | None = None,
    debug_folder: Path | None = None,
    compiler: SubgraphCompiler | None = None,
) -> Recipe:
    """The recipe that ``options`` ask for; it reads nothing else of the configuration.

    What models compile by themselves when they run eagerly, FlexAttention on GPUs, is compiled in
    any case, and in the same way.

    Args:
        options: validated.
        reshard_after_forward: whether FSDP parameters are gathered again for the backward.
        only: names of the passes to run, for a graph that is a piece of a step; None for all.
        debug_folder: where the graphs before and after each pass are written if
            ``options.debug_graph_passes`` asks for them, in one folder for each captured graph.
            Every rank needs its own.
        compiler: in place of Inductor, for a graph that is not going to run.
    """
    numbers = itertools.count()

    def build(context: PassContext) -> PassPipeline:
        dump_directory = None
        if options.debug_graph_passes and debug_folder is not None:
            dump_directory = debug_folder / f"graph_{next(numbers)}"
        if options.inductor_compilation == "autoparallel_backend":
            # Imported here: no other run pays for it.
            from gt_autoparallel.backend import backend_recipe

            gib = options.autoparallel_solver.memory_budget_gib
            return backend_recipe(
                context=context,
                memory_budget_bytes=None if gib is None else int(gib * 2**30),
                compiler=compiler,
                verify=options.verify_passes,
                dump_directory=dump_directory,
            )
        return default_recipe(
            options,
            context=context,
            reshard_after_forward=_RESHARD[reshard_after_forward],
            only=only,
            compiler=compiler,
            flex_attention_options=flex_attention_options(),
            dump_directory=dump_directory,
        )

    return build
