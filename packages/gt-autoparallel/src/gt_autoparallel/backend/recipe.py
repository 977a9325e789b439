"""The passes of ``autoparallel_backend``: what a planned step gets in place of the native recipe.

Where the native recipe does what a user chooses among policies, this one has a single policy:
recompute just enough to keep the memory budget of the plan, overlap every collective with what does
not need it, and give the whole graph to Inductor as one partition. It is what AutoParallel's own
mode does (torchtitan's ``autoparallel`` experiment), with verified passes.
"""

from __future__ import annotations

from gt_autoparallel.backend.overlap_collectives import OverlapCollectives
from gt_autoparallel.backend.tag_to_memory_budget import TagToMemoryBudget
from gt_passes import (
    BucketAllGathers,
    BucketAllReduces,
    BucketReduceScatters,
    CanonicalizeViews,
    CompileWholeGraph,
    DelayWaits,
    GraphPass,
    InductorCompiler,
    MergeWaits,
    PrefetchAllGathers,
    RecomputeTagged,
    RemoveDeadCode,
    ReshardAfterForward,
    ShareAllGathers,
    SubgraphCompiler,
)


def backend_passes(
    *,
    memory_budget_bytes: int | None = None,
    bucket_cap_mib: int | None = None,
    reshard_after_forward: bool | None = None,
    compiler: SubgraphCompiler | None = None,
) -> tuple[GraphPass, ...]:
    """The passes for the captured step of a placed model, in their order.

    Args:
        memory_budget_bytes: of one rank, as for the plan; None for no limit: nothing is recomputed.
        bucket_cap_mib: the largest bucket in MiB; None for no limit.
        reshard_after_forward: whether FSDP parameters are gathered again for the backward; None:
            not, since the plan says which are.
        compiler: compiles the whole graph; None for Inductor.
    """
    has_budget = memory_budget_bytes is not None
    tagging = [TagToMemoryBudget(budget_bytes=memory_budget_bytes), RecomputeTagged()]
    return (
        RemoveDeadCode(),
        MergeWaits(),
        CanonicalizeViews(),
        ShareAllGathers(scope="phase"),
        *(tagging if has_budget else []),
        *([ReshardAfterForward()] if reshard_after_forward else []),
        BucketAllGathers(cap_mib=bucket_cap_mib),
        BucketReduceScatters(cap_mib=bucket_cap_mib),
        BucketAllReduces(cap_mib=bucket_cap_mib),
        DelayWaits(),
        PrefetchAllGathers(),
        OverlapCollectives(),
        CompileWholeGraph(compiler=compiler or InductorCompiler()),
    )
