"""Pipeline stages as captured graphs, one for each schedule action."""

from gt_pipeline.graph.action_graph import ActionGraph
from gt_pipeline.graph.action_transform import GraphTransform
from gt_pipeline.graph.activations import ActivationPlacement
from gt_pipeline.graph.exposed_collectives import (
    ExposedCollective,
    draw_lanes,
    exposed_collectives,
)
from gt_pipeline.graph.overlapped_actions import OverlappedActions, overlap_actions
from gt_pipeline.graph.pipeline_stage import GraphPipelineStage, JointTransform
from gt_pipeline.graph.recomposition import find_recomposition_problems, recompose
from gt_pipeline.graph.slots import Slot, SlotKind
from gt_pipeline.graph.stage_capture import (
    StageCapture,
    StageLoss,
    capture_stage,
)
from gt_pipeline.graph.stage_cut import cut_stage
from gt_pipeline.graph.stage_graphs import StageGraphs

__all__ = [
    "ActionGraph",
    "ActivationPlacement",
    "ExposedCollective",
    "GraphPipelineStage",
    "GraphTransform",
    "JointTransform",
    "OverlappedActions",
    "Slot",
    "SlotKind",
    "StageCapture",
    "StageGraphs",
    "StageLoss",
    "capture_stage",
    "cut_stage",
    "draw_lanes",
    "exposed_collectives",
    "find_recomposition_problems",
    "overlap_actions",
    "recompose",
]
