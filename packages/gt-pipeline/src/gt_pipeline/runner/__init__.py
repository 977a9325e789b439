"""Running a pipeline schedule: `GraphPPRunner` and what it asks of a stage; captures nothing."""

from gt_pipeline.runner.graph_pp_runner import GraphPPRunner
from gt_pipeline.runner.microbatches import MicrobatchDims
from gt_pipeline.runner.stage_protocol import (
    ActivationSignature,
    MicrobatchInputs,
    NamesKwargs,
    PipelineStageGraphs,
)
from gt_pipeline.runner.step_record import StepRecord

__all__ = [
    "ActivationSignature",
    "GraphPPRunner",
    "MicrobatchDims",
    "MicrobatchInputs",
    "NamesKwargs",
    "PipelineStageGraphs",
    "StepRecord",
]
