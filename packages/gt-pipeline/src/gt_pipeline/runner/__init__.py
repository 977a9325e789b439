"""Running a pipeline schedule: `GraphPPRunner` and what it asks of a stage; captures nothing."""

from gt_pipeline.runner.graph_pp_runner import GraphPPRunner, LossReduction, StepResult
from gt_pipeline.runner.microbatches import MicrobatchDims
from gt_pipeline.runner.stage_protocol import (
    CapturedStageGraphs,
    MicrobatchInputs,
    NamesKwargs,
    PipelineStageGraphs,
    Tensors,
    TensorSignature,
)
from gt_pipeline.runner.step_record import StepRecord

__all__ = [
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
