"""Running a pipeline schedule: `GraphPPRunner` and what it asks of a stage. Imports torch alone."""

from gt_pipeline.runner.graph_pp_runner import GraphPPRunner, LossReduction, StepResult
from gt_pipeline.runner.microbatches import MicrobatchDims
from gt_pipeline.runner.stage_protocol import (
    BackwardKind,
    CapturedStageGraphs,
    MicrobatchInputs,
    NamesKwargs,
    PipelineStageGraphs,
    Tensors,
    TensorSignature,
)
from gt_pipeline.runner.step_record import StepRecord

__all__ = [
    "BackwardKind",
    "CapturedStageGraphs",
    "GraphPPRunner",
    "LossReduction",
    "MicrobatchDims",
    "MicrobatchInputs",
    "NamesKwargs",
    "PipelineStageGraphs",
    "StepRecord",
    "StepResult",
    "TensorSignature",
    "Tensors",
]
