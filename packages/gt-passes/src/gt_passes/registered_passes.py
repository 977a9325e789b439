"""The passes, one a file. Importing this package registers them all."""

from gt_passes.clean_up.canonicalize_views import CanonicalizeViews
from gt_passes.clean_up.merge_waits import MergeWaits
from gt_passes.clean_up.remove_dead_code import DeadCollectives, RemoveDeadCode
from gt_passes.compilation.compile_flex_attention import CompileFlexAttention
from gt_passes.compilation.compile_regions import CompileRegions
from gt_passes.compilation.compile_whole_graph import CompileWholeGraph
from gt_passes.cuda_graphs.cuda_graphs import CudaGraphs, release_cuda_graphs
from gt_passes.ep_overlap.chunk_modules import ChunkModules
from gt_passes.ep_overlap.schedule_ep_overlap import ScheduleEpOverlap
from gt_passes.ep_overlap.separate_exchange_group import SeparateExchangeGroup
from gt_passes.fsdp.bucket_all_gathers import BucketAllGathers
from gt_passes.fsdp.bucket_all_reduces import BucketAllReduces
from gt_passes.fsdp.bucket_reduce_scatters import BucketReduceScatters
from gt_passes.fsdp.delay_waits import DelayWaits
from gt_passes.fsdp.prefetch_all_gathers import PrefetchAllGathers
from gt_passes.fsdp.reshard_after_forward import ReshardAfterForward
from gt_passes.fsdp.schedule_fsdp_into_dense_regions import ScheduleFsdpIntoDenseRegions
from gt_passes.fsdp.separate_reduction_group import SeparateReductionGroup
from gt_passes.fsdp.share_all_gathers import ShareAllGathers, SharingScope
from gt_passes.memory_policy.offload_tagged import OffloadTagged
from gt_passes.memory_policy.recompute_tagged import RecomputeTagged
from gt_passes.memory_policy.tag_saved_tensors import TagSavedTensors
from gt_passes.tensor_parallel.async_tensor_parallel import AsyncTensorParallel
from gt_passes.tensor_parallel.fuse_parallel_matmuls import FuseParallelMatmuls

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
