"""Graph passes over captured training steps, verified after every pass.

::

    context = PassContext.from_graph(graph_module)
    report = default_recipe(context=context).run(graph_module)
    print(report)
"""

from gt_passes.contract import ChangeBounds, GraphPass, PassContext, PassReport, Refusal
from gt_passes.cuda_graph_replay import Recorder, Recording
from gt_passes.cuda_graph_safety import CaptureTarget
from gt_passes.errors import (
    CudaGraphAddressError,
    GraphInputError,
    GtPassesError,
    InductorOptionError,
    PassDeclarationError,
    PassOrderError,
    RecipeError,
    UnknownPassError,
    VerificationError,
)
from gt_passes.facts import (
    CANONICAL_VIEWS,
    NO_DEAD_CODE,
    ONE_ALL_GATHER_PER_PARAMETER,
    Fact,
)
from gt_passes.graph_problem import GraphProblem
from gt_passes.inductor_compiler import DescribeOnly, InductorCompiler, SubgraphCompiler
from gt_passes.passes import (
    CanonicalizeViews,
    CompileRegions,
    CompileWholeGraph,
    CudaGraphs,
    RemoveDeadCode,
    ShareAllGathers,
    release_cuda_graphs,
)
from gt_passes.pipeline import PassPipeline
from gt_passes.pipeline_report import GraphSize, PassRecord, PipelineReport
from gt_passes.recipes import default_recipe
from gt_passes.registry import find_passes, known_passes, register_pass
from gt_passes.repropagation import UnverifiedNode
from gt_passes.verifier import GraphInterface, VerificationReport, Verifier

__all__ = [
    "CANONICAL_VIEWS",
    "NO_DEAD_CODE",
    "ONE_ALL_GATHER_PER_PARAMETER",
    "CanonicalizeViews",
    "CaptureTarget",
    "ChangeBounds",
    "CompileRegions",
    "CompileWholeGraph",
    "CudaGraphAddressError",
    "CudaGraphs",
    "DescribeOnly",
    "Fact",
    "GraphInputError",
    "GraphInterface",
    "GraphPass",
    "GraphProblem",
    "GraphSize",
    "GtPassesError",
    "InductorCompiler",
    "InductorOptionError",
    "PassContext",
    "PassDeclarationError",
    "PassOrderError",
    "PassPipeline",
    "PassRecord",
    "PassReport",
    "PipelineReport",
    "RecipeError",
    "Recorder",
    "Recording",
    "Refusal",
    "RemoveDeadCode",
    "ShareAllGathers",
    "SubgraphCompiler",
    "UnknownPassError",
    "UnverifiedNode",
    "VerificationError",
    "VerificationReport",
    "Verifier",
    "default_recipe",
    "find_passes",
    "known_passes",
    "register_pass",
    "release_cuda_graphs",
]
