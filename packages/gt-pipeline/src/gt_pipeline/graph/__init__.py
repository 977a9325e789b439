"""Pipeline stages as captured graphs, one for each schedule action."""

from gt_pipeline.graph.action_graph import ActionGraph
from gt_pipeline.graph.recomposition import find_recomposition_problems, recompose
from gt_pipeline.graph.slots import Slot, SlotKind
from gt_pipeline.graph.stage_capture import StageCapture, StageLoss, capture_stage
from gt_pipeline.graph.stage_cut import cut_stage
from gt_pipeline.graph.stage_graphs import StageGraphs

__all__ = [
    "ActionGraph",
    "Slot",
    "SlotKind",
    "StageCapture",
    "StageGraphs",
    "StageLoss",
    "capture_stage",
    "cut_stage",
    "find_recomposition_problems",
    "recompose",
]
