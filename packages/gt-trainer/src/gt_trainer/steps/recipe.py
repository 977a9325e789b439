"""From the user's ``--compile.*`` options to the passes of each graph of a run.

The native recipe (``gt_passes.default_passes``), or that of the backend of planned steps. Which
graphs there are follows from the mode and the pipeline; which passes run on each, from where the
passes declare to run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from torch.fx import GraphModule

from gt_config import CompileConfig
from gt_config.graph_kinds import PIPELINE_ACTIONS, GraphKind
from gt_passes import (
    GraphPass,
    PassContext,
    PassManager,
    SubgraphCompiler,
    declare_pure_operator,
    default_passes,
)
from gt_trainer.decoder.attention import flex_attention_options
from gt_trainer.placement.planned_machine import planned_machine
from gt_trainer.steps.program import Recipe

ReshardChoice = Literal["default", "always", "never"]
"""torchtitan's ``--parallelism.fsdp_reshard_after_forward``."""

_RESHARD: dict[ReshardChoice, bool | None] = {
    "default": None,  # as the memory policy says
    "always": True,
    "never": False,
}

# torchtitan's expert-parallel combine (torchtitan/ops/scatter_add.py) is a sum in a fixed order.
declare_pure_operator("torchtitan::deterministic_scatter_add")


def graphs_of(options: CompileConfig, *, has_pipeline: bool) -> tuple[GraphKind, ...]:
    """The kinds of graph that a run captures; none of an eager one.

    Args:
        options: validated.
        has_pipeline: whether the model is cut into stages.
    """
    if options.mode == "none":
        return ()
    if has_pipeline:
        return ("STAGE", *PIPELINE_ACTIONS)
    if options.mode == "aot_joint":
        return ("JOINT_FORWARD", "JOINT_BACKWARD")
    if options.accumulation == "reduce_once":
        return ("MICROBATCH",)
    return ("STEP",)


def passes_of(
    options: CompileConfig,
    graph: GraphKind,
    *,
    reshard_after_forward: ReshardChoice = "default",
    compiler: SubgraphCompiler | None = None,
) -> tuple[GraphPass, ...]:
    """The passes that ``options`` ask for on a kind of graph; equal where they mean the same.

    What models compile by themselves when they run eagerly, FlexAttention on GPUs, is compiled in
    any case, and in the same way. A graph that is not going to run has the symmetric memory of the
    machine that it is planned for.

    Args:
        options: validated; nothing else of the configuration is read.
        graph: the kind of graph.
        reshard_after_forward: whether FSDP parameters are gathered again for the backward.
        compiler: in place of Inductor, for a graph that is not going to run.
    """
    if options.inductor_compilation == "autoparallel_backend":
        # Imported here: no other run pays for it.
        from gt_autoparallel.backend import backend_passes
        from gt_trainer.placement.memory_budget import asked_budget_bytes

        return backend_passes(
            memory_budget_bytes=asked_budget_bytes(options.autoparallel_solver),
            bucket_cap_mib=options.fsdp_bucket_cap_mib,
            reshard_after_forward=_RESHARD[reshard_after_forward],
            compiler=compiler,
        )
    return default_passes(
        options,
        graph=graph,
        reshard_after_forward=_RESHARD[reshard_after_forward],
        compiler=compiler,
        flex_attention_options=flex_attention_options(),
        symmetric_memory=None if compiler is None else planned_machine().symmetric_memory(),
    )


def recipe_of(
    options: CompileConfig,
    *,
    reshard_after_forward: ReshardChoice = "default",
    debug_folder: Path | None = None,
    compiler: SubgraphCompiler | None = None,
    summarize: Callable[[GraphModule], object] | None = None,
) -> Recipe:
    """``passes_of``, to be bound to the graphs of a run.

    Args:
        options: as for ``passes_of``.
        reshard_after_forward: as for ``passes_of``.
        debug_folder: where the graphs before and after each pass are written if
            ``options.debug_graph_passes`` asks for them, in one folder for each captured graph.
            Every rank needs its own.
        compiler: as for ``passes_of``.
        summarize: as for ``PassManager``.
    """
    numbers = itertools.count()

    def build(context: PassContext, graph: GraphKind) -> PassManager:
        dump_directory = None
        if options.debug_graph_passes and debug_folder is not None:
            dump_directory = debug_folder / f"graph_{next(numbers)}"
        passes = passes_of(
            options, graph, reshard_after_forward=reshard_after_forward, compiler=compiler
        )
        return PassManager(
            passes,
            context=context,
            verify=options.verify_passes,
            dump_directory=dump_directory,
            summarize=summarize,
        )

    return build
