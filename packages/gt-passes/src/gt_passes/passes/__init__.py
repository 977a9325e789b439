"""The passes, one a file. Importing this package registers them all."""

from gt_passes.passes.canonicalize_views import CanonicalizeViews
from gt_passes.passes.compile_regions import CompileRegions
from gt_passes.passes.compile_whole_graph import CompileWholeGraph
from gt_passes.passes.cuda_graphs import CudaGraphs, release_cuda_graphs
from gt_passes.passes.recompute_tagged import RecomputeTagged
from gt_passes.passes.remove_dead_code import DeadCollectives, RemoveDeadCode
from gt_passes.passes.share_all_gathers import ShareAllGathers, SharingScope
from gt_passes.passes.tag_saved_tensors import MemoryPolicyName, TagSavedTensors

__all__ = [
    "CanonicalizeViews",
    "CompileRegions",
    "CompileWholeGraph",
    "CudaGraphs",
    "DeadCollectives",
    "MemoryPolicyName",
    "RecomputeTagged",
    "RemoveDeadCode",
    "ShareAllGathers",
    "SharingScope",
    "TagSavedTensors",
    "release_cuda_graphs",
]
