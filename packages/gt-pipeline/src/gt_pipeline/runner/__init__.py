"""Running a pipeline schedule: `GraphPPRunner` and what it asks of a stage; captures nothing."""

from gt_pipeline.runner.graph_pp_runner import GraphPPRunner, LossReduction, StepResult
from gt_pipeline.runner.microbatches import MicrobatchDims
from gt_pipeline.runner.stage_protocol import (
    ActivationSignature,
    CapturedStageGraphs,
    MicrobatchInputs,
    NamesKwargs,
    PipelineStageGraphs,
    Tensors,
)
from gt_pipeline.runner.step_record import StepRecord

__all__ = [
    "ActivationSignature",
    "CapturedStageGraphs",
    "GraphPPRunner",
    "LossReduction",
    "MicrobatchDims",
    "MicrobatchInputs",
    "NamesKwargs",
    "PipelineStageGraphs",
    "StepRecord",
    "StepResult",
    "Tensors",
]
