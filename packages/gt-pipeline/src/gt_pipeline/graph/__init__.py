"""Pipeline stages as captured graphs, one for each schedule action."""

from gt_pipeline.graph.accumulated_step import AccumulatedResult, AccumulatedStep
from gt_pipeline.graph.accumulation_cut import (
    AccumulationGraphs,
    MicrobatchGraph,
    cut_accumulation,
)
from gt_pipeline.graph.activations import ActivationPlacement
from gt_pipeline.graph.cut_document import MICROBATCHES_FORM, STAGE_FORM
from gt_pipeline.graph.exposed_collectives import exposed_collectives
from gt_pipeline.graph.pipeline_stage import GraphPipelineStage
from gt_pipeline.graph.rewrite_stage import RewrittenStage, rewrite_stage
from gt_pipeline.graph.stage_capture import StageCapture, StageLoss, capture_stage
from gt_pipeline.graph.stage_cut import cut_stage
from gt_pipeline.graph.stage_graphs import StageGraphs

__all__ = [
    "MICROBATCHES_FORM",
    "STAGE_FORM",
    "AccumulatedResult",
    "AccumulatedStep",
    "AccumulationGraphs",
    "ActivationPlacement",
    "GraphPipelineStage",
    "MicrobatchGraph",
    "RewrittenStage",
    "StageCapture",
    "StageGraphs",
    "StageLoss",
    "capture_stage",
    "cut_accumulation",
    "cut_stage",
    "exposed_collectives",
    "rewrite_stage",
]
