"""Graph passes over captured training steps, verified after every pass.

::

    traced = gt_trace.trace_step(step, module=model)(*batch)
    print(optimize(traced))  # what each pass of the default recipe did to traced.graph_module
"""

from gt_passes.analysis.liveness import estimate_memory, estimate_peak_bytes
from gt_passes.analysis.node_calls import call_like
from gt_passes.analysis.operator_effects import declare_pure_operator
from gt_passes.clean_up.canonicalize_views import CanonicalizeViews
from gt_passes.clean_up.merge_waits import MergeWaits
from gt_passes.clean_up.remove_dead_code import RemoveDeadCode
from gt_passes.compilation.compile_flex_attention import CompileFlexAttention
from gt_passes.compilation.compile_regions import CompileRegions
from gt_passes.compilation.compile_whole_graph import CompileWholeGraph
from gt_passes.compilation.inductor_compiler import DescribeOnly, InductorCompiler, SubgraphCompiler
from gt_passes.contract import ChangeBounds, GraphPass, PassContext, PassReport, Refusal
from gt_passes.cuda_graphs.cuda_graphs import CudaGraphs, release_cuda_graphs
from gt_passes.ep_overlap.chunk_modules import ChunkModules
from gt_passes.ep_overlap.schedule_ep_overlap import ScheduleEpOverlap
from gt_passes.ep_overlap.separate_exchange_group import SeparateExchangeGroup
from gt_passes.errors import GtPassesError, RecipeError, VerificationError
from gt_passes.fsdp.bucket_all_gathers import BucketAllGathers
from gt_passes.fsdp.bucket_all_reduces import BucketAllReduces
from gt_passes.fsdp.bucket_reduce_scatters import BucketReduceScatters
from gt_passes.fsdp.delay_waits import DelayWaits
from gt_passes.fsdp.prefetch_all_gathers import PrefetchAllGathers
from gt_passes.fsdp.quantize_before_gather import QuantizeBeforeGather
from gt_passes.fsdp.reshard_after_forward import ReshardAfterForward
from gt_passes.fsdp.schedule_fsdp_into_dense_regions import ScheduleFsdpIntoDenseRegions
from gt_passes.fsdp.separate_reduction_group import SeparateReductionGroup
from gt_passes.fsdp.share_all_gathers import ShareAllGathers
from gt_passes.memory_policy.memory_policy_pass import MemoryPolicyPass
from gt_passes.memory_policy.offload_tagged import OffloadTagged
from gt_passes.memory_policy.recompute_tagged import RecomputeTagged
from gt_passes.memory_policy.residency_table import residency_table
from gt_passes.memory_policy.tag_saved_tensors import TagSavedTensors
from gt_passes.optimize_step import optimize
from gt_passes.pass_manager import PassManager
from gt_passes.pass_manager_report import PassManagerReport, PassRecord
from gt_passes.pass_report_data import pass_report_as_data, pass_report_from_data
from gt_passes.recipes import default_passes, default_recipe
from gt_passes.registry import known_passes, register_pass
from gt_passes.second_groups import GroupPurpose, second_group_of
from gt_passes.tensor_parallel.async_tensor_parallel import AsyncTensorParallel
from gt_passes.tensor_parallel.fuse_parallel_matmuls import FuseParallelMatmuls
from gt_passes.tensor_parallel.symmetric_memory import SymmetricMemoryOnPaper
from gt_passes.verifier.collective_exchange import exchange_collective_digest
from gt_passes.verifier.verifier import Verifier

__version__ = "0.1.0"

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
    "MemoryPolicyPass",
    "MergeWaits",
    "OffloadTagged",
    "PassContext",
    "PassManager",
    "PassManagerReport",
    "PassRecord",
    "PassReport",
    "PrefetchAllGathers",
    "QuantizeBeforeGather",
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
    "SymmetricMemoryOnPaper",
    "TagSavedTensors",
    "VerificationError",
    "Verifier",
    "call_like",
    "declare_pure_operator",
    "default_passes",
    "default_recipe",
    "estimate_memory",
    "estimate_peak_bytes",
    "exchange_collective_digest",
    "known_passes",
    "optimize",
    "pass_report_as_data",
    "pass_report_from_data",
    "register_pass",
    "release_cuda_graphs",
    "residency_table",
    "second_group_of",
]
