"""The passes, one a file. Importing this package registers them all."""

from gt_passes.passes.async_tensor_parallel import AsyncTensorParallel
from gt_passes.passes.bucket_all_gathers import BucketAllGathers
from gt_passes.passes.bucket_all_reduces import BucketAllReduces
from gt_passes.passes.bucket_reduce_scatters import BucketReduceScatters
from gt_passes.passes.canonicalize_views import CanonicalizeViews
from gt_passes.passes.chunk_modules import ChunkModules
from gt_passes.passes.compile_flex_attention import CompileFlexAttention
from gt_passes.passes.compile_regions import CompileRegions
from gt_passes.passes.compile_whole_graph import CompileWholeGraph
from gt_passes.passes.cuda_graphs import CudaGraphs, release_cuda_graphs
from gt_passes.passes.delay_waits import DelayWaits
from gt_passes.passes.merge_waits import MergeWaits
from gt_passes.passes.numerics_changing import FuseParallelMatmuls
from gt_passes.passes.offload_tagged import OffloadTagged
from gt_passes.passes.prefetch_all_gathers import PrefetchAllGathers
from gt_passes.passes.recompute_tagged import RecomputeTagged
from gt_passes.passes.remove_dead_code import DeadCollectives, RemoveDeadCode
from gt_passes.passes.reshard_after_forward import ReshardAfterForward
from gt_passes.passes.schedule_ep_overlap import ScheduleEpOverlap
from gt_passes.passes.schedule_fsdp_into_dense_regions import ScheduleFsdpIntoDenseRegions
from gt_passes.passes.separate_exchange_group import SeparateExchangeGroup
from gt_passes.passes.separate_reduction_group import SeparateReductionGroup
from gt_passes.passes.share_all_gathers import ShareAllGathers, SharingScope
from gt_passes.passes.tag_saved_tensors import MemoryPolicyName, TagSavedTensors

__all__ = [
    "AsyncTensorParallel",
    "BucketAllGathers",
    "BucketAllReduces",
    "BucketReduceScatters",
    "CanonicalizeViews",
    "ChunkModules",
    "CompileFlexAttention",
    "CompileRegions",
    "CompileWholeGraph",
    "CudaGraphs",
    "DeadCollectives",
    "DelayWaits",
    "FuseParallelMatmuls",
    "MemoryPolicyName",
    "MergeWaits",
    "OffloadTagged",
    "PrefetchAllGathers",
    "RecomputeTagged",
    "RemoveDeadCode",
    "ReshardAfterForward",
    "ScheduleEpOverlap",
    "ScheduleFsdpIntoDenseRegions",
    "SeparateExchangeGroup",
    "SeparateReductionGroup",
    "ShareAllGathers",
    "SharingScope",
    "TagSavedTensors",
    "release_cuda_graphs",
]
