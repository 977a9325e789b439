"""The public surface of the package."""

from __future__ import annotations

import re
from pathlib import Path

import gt_passes
from gt_passes import errors

README = Path(__file__).parents[1] / "README.md"


def test_the_public_names_are_exactly_these():
    assert gt_passes.__all__ == [
        "CANONICAL_VIEWS",
        "NO_DEAD_CODE",
        "ONE_ALL_GATHER_PER_PARAMETER",
        "AsyncTensorParallel",
        "BucketAllGathers",
        "BucketAllReduces",
        "BucketReduceScatters",
        "CanonicalizeViews",
        "CaptureTarget",
        "ChangeBounds",
        "ChunkMetadataError",
        "ChunkModules",
        "CollectiveMismatchError",
        "CompileFlexAttention",
        "CompileRegions",
        "CompileWholeGraph",
        "CudaGraphAddressError",
        "CudaGraphs",
        "DelayWaits",
        "DescribeOnly",
        "Fact",
        "ForwardChunkingError",
        "FuseParallelMatmuls",
        "GraphChunkingError",
        "GraphInputError",
        "GraphInterface",
        "GraphPass",
        "GraphProblem",
        "GraphSize",
        "GroupPurpose",
        "GtPassesError",
        "InductorCompiler",
        "InductorOptionError",
        "MemoryProfile",
        "MergeWaits",
        "OffloadTagged",
        "PassContext",
        "PassDeclarationError",
        "PassManager",
        "PassManagerReport",
        "PassOrderError",
        "PassRecord",
        "PassReport",
        "PrefetchAllGathers",
        "RecipeError",
        "RecomputeTagged",
        "Recorder",
        "Recording",
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
        "UnknownPassError",
        "UnverifiedNode",
        "VerificationError",
        "VerificationReport",
        "Verifier",
        "declare_pure_operator",
        "default_passes",
        "default_recipe",
        "estimate_memory",
        "estimate_peak_bytes",
        "exchange_collective_digest",
        "find_passes",
        "known_passes",
        "register_pass",
        "release_cuda_graphs",
        "residency_table",
        "second_group_of",
    ]
    assert all(hasattr(gt_passes, name) for name in gt_passes.__all__)


def test_every_error_stands_in_the_tree_and_is_public():
    tree = errors.__doc__ or ""
    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, errors.GtPassesError)
        assert name in tree
        assert name in gt_passes.__all__
        for base in (ValueError, TypeError, RuntimeError):
            if issubclass(error, base):
                assert re.search(rf"{name} +\({base.__name__}\)", tree)
