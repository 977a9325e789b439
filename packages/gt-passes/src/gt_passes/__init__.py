"""Graph passes over captured training steps, verified after every pass.

::

    context = PassContext.from_graph(graph_module)
    report = default_recipe(context=context).run(graph_module)
    print(report)
"""

from gt_passes.analysis.liveness import estimate_memory, estimate_peak_bytes
from gt_passes.analysis.operator_effects import declare_pure_operator
from gt_passes.compilation.inductor_compiler import DescribeOnly, InductorCompiler, SubgraphCompiler
from gt_passes.contract import ChangeBounds, GraphPass, PassContext, PassReport, Refusal
from gt_passes.errors import GtPassesError, PassOrderError, RecipeError, VerificationError
from gt_passes.memory_policy.residency_table import residency_table
from gt_passes.pass_manager import PassManager
from gt_passes.pass_manager_report import PassManagerReport, PassRecord
from gt_passes.recipes import default_passes, default_recipe
from gt_passes.registered_passes import (
    AsyncTensorParallel,
    BucketAllGathers,
    BucketAllReduces,
    BucketReduceScatters,
    CanonicalizeViews,
    ChunkModules,
    CompileFlexAttention,
    CompileRegions,
    CompileWholeGraph,
    CudaGraphs,
    DelayWaits,
    FuseParallelMatmuls,
    MergeWaits,
    OffloadTagged,
    PrefetchAllGathers,
    RecomputeTagged,
    RemoveDeadCode,
    ReshardAfterForward,
    ScheduleEpOverlap,
    ScheduleFsdpIntoDenseRegions,
    SeparateExchangeGroup,
    SeparateReductionGroup,
    ShareAllGathers,
    TagSavedTensors,
    release_cuda_graphs,
)
from gt_passes.registry import known_passes, register_pass
from gt_passes.second_groups import GroupPurpose, second_group_of
from gt_passes.verifier.collective_exchange import exchange_collective_digest
from gt_passes.verifier.verifier import Verifier

__all__ = [
    "AsyncTensorParallel",
    "BucketAllGathers",
    "BucketAllReduces",
    "BucketReduceScatters",
    "CanonicalizeViews",
    "ChangeBounds",
    "ChunkModules",
    "CompileFlexAttention",
    "CompileRegions",
    "CompileWholeGraph",
    "CudaGraphs",
    "DelayWaits",
    "DescribeOnly",
    "FuseParallelMatmuls",
    "GraphPass",
    "GroupPurpose",
    "GtPassesError",
    "InductorCompiler",
    "MergeWaits",
    "OffloadTagged",
    "PassContext",
    "PassManager",
    "PassManagerReport",
    "PassOrderError",
    "PassRecord",
    "PassReport",
    "PrefetchAllGathers",
    "RecipeError",
    "RecomputeTagged",
    "Refusal",
    "RemoveDeadCode",
    "ReshardAfterForward",
    "ScheduleEpOverlap",
    "ScheduleFsdpIntoDenseRegions",
    "SeparateExchangeGroup",
    "SeparateReductionGroup",
    "ShareAllGathers",
    "SubgraphCompiler",
    "TagSavedTensors",
    "VerificationError",
    "Verifier",
    "declare_pure_operator",
    "default_passes",
    "default_recipe",
    "estimate_memory",
    "estimate_peak_bytes",
    "exchange_collective_digest",
    "known_passes",
    "register_pass",
    "release_cuda_graphs",
    "residency_table",
    "second_group_of",
]
