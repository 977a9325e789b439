"""The passes of ``autoparallel_backend``: what a planned step gets in place of the native recipe.

Where the native recipe does what a user chooses among policies, this one has a single policy:
recompute just enough to keep the memory budget of the plan, overlap every collective with what does
not need it, and give the whole graph to Inductor as one partition. It is what AutoParallel's own
mode does (torchtitan's ``autoparallel`` experiment), with verified passes.
"""

from __future__ import annotations

from pathlib import Path

from gt_autoparallel.backend.overlap_collectives import OverlapCollectives
from gt_autoparallel.backend.tag_to_memory_budget import TagToMemoryBudget
from gt_passes import (
    BucketAllGathers,
    BucketAllReduces,
    BucketReduceScatters,
    CanonicalizeViews,
    CompileWholeGraph,
    DelayWaits,
    InductorCompiler,
    MergeWaits,
    PassContext,
    PassManager,
    PrefetchAllGathers,
    RecomputeTagged,
    RemoveDeadCode,
    ReshardAfterForward,
    ShareAllGathers,
    SubgraphCompiler,
)


def backend_recipe(
    *,
    context: PassContext,
    memory_budget_bytes: int | None = None,
    compiler: SubgraphCompiler | None = None,
    verify: bool = True,
    dump_directory: Path | None = None,
) -> PassManager:
    """The pipeline for the captured step of a placed model.

    Args:
        context: of the graph to run on.
        memory_budget_bytes: of one rank, as for the plan; None for no limit: nothing is recomputed.
        compiler: compiles the whole graph; None for Inductor.
        verify: as for ``PassManager``.
        dump_directory: as for ``PassManager``.
    """
    tagging = (
        [
            TagToMemoryBudget(budget_bytes=memory_budget_bytes),
            RecomputeTagged(),
            ReshardAfterForward(),
        ]
        if memory_budget_bytes is not None
        else []
    )
    return PassManager(
        [
            RemoveDeadCode(),
            MergeWaits(),
            CanonicalizeViews(),
            ShareAllGathers(),
            *tagging,
            BucketAllGathers(),
            BucketReduceScatters(),
            BucketAllReduces(),
            DelayWaits(),
            PrefetchAllGathers(),
            OverlapCollectives(),
            CompileWholeGraph(compiler=compiler or InductorCompiler()),
        ],
        context=context,
        verify=verify,
        dump_directory=dump_directory,
    )
