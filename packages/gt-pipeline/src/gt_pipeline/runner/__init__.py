"""Running a pipeline schedule: `GraphPPRunner` and what it asks of a stage."""

from gt_pipeline.runner.stage_protocol import (
    BackwardKind,
    MicrobatchInputs,
    PipelineStageGraphs,
    Tensors,
    TensorSignature,
)

__all__ = [
    "BackwardKind",
    "MicrobatchInputs",
    "PipelineStageGraphs",
    "TensorSignature",
    "Tensors",
]
