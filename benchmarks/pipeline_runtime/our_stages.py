"""Our runner over stages that compute nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gt_config.node_keys import OverlappedBackward
from gt_pipeline.runner import (
    ActivationSignature,
    GraphPPRunner,
    MicrobatchInputs,
    PipelineStageGraphs,
)
from gt_pipeline.runner.stage_protocol import Tensors
from gt_pipeline.schedules import Schedule

__all__ = ["our_runner"]

_LOSS = ActivationSignature(shape=(), dtype=torch.float32, requires_grad=True)


class _NoOpStage:
    """Returns the same tensors for every microbatch."""

    device = torch.device("cpu")
    num_saved = 0

    def __init__(self, stage_index: int, num_stages: int, shape: tuple[int, ...]) -> None:
        self.stage_index = stage_index
        self.num_stages = num_stages
        activation = ActivationSignature(shape=shape, dtype=torch.float32, requires_grad=True)
        is_first, is_last = stage_index == 0, stage_index == num_stages - 1
        self.input_signature = () if is_first else (activation,)
        self.output_signature = (_LOSS,) if is_last else (activation,)
        self._outputs = (torch.zeros(()) if is_last else torch.zeros(shape),)
        self._input_gradients = () if is_first else (torch.zeros(shape),)

    def unshard(self) -> None:
        pass

    def reshard(self) -> None:
        pass

    def forward(self, microbatch: int, activations: Tensors, inputs: MicrobatchInputs) -> Tensors:
        return self._outputs

    evaluate = forward

    def full_backward(self, microbatch: int, output_gradients: Tensors) -> Tensors:
        return self._input_gradients

    backward_input = full_backward

    def backward_weight(self, microbatch: int) -> None:
        pass

    def overlap(
        self,
        microbatch: int,
        activations: Tensors,
        inputs: MicrobatchInputs,
        *,
        backward_stage: PipelineStageGraphs,
        backward_kind: OverlappedBackward,
        backward_microbatch: int,
        output_gradients: Tensors,
    ) -> tuple[Tensors, Tensors]:
        return self._outputs, backward_stage.full_backward(backward_microbatch, output_gradients)

    def reduce_gradients(self) -> None:
        pass

    def parameters(self) -> Mapping[str, Tensor]:
        return {}

    def gradients(self) -> Mapping[str, Tensor]:
        return {}

    def discard(self) -> None:
        pass


def our_runner(schedule: Schedule, rank: int, shape: tuple[int, ...]) -> GraphPPRunner:
    """A runner over the stages of a rank."""
    stages = [
        _NoOpStage(index, schedule.num_stages, shape) for index in schedule.stages_of_rank(rank)
    ]
    return GraphPPRunner(stages, schedule)
