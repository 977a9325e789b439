"""PyTorch's pipeline runtime over stages that compute nothing.

Its stages keep what they do around a computation; the two methods that compute are replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from gt_pipeline.schedules import Schedule, build_pipeline_schedule

__all__ = ["PEER_NAME", "Scale", "step_torch", "torch_runtime"]

PEER_NAME = "torch.distributed.pipelining"


class Scale(nn.Module):
    """What a stage would compute; PyTorch runs it once, to learn shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.factor


class _NoOpStage(PipelineStage):
    def __init__(self, index: int, num_stages: int, shape: tuple[int, ...]) -> None:
        super().__init__(Scale(), index, num_stages, torch.device("cpu"))
        self._output = torch.zeros(shape, requires_grad=True) * 1
        self._gradients = (torch.zeros(shape),)
        self._computes = False

    def start_doing_nothing(self) -> None:
        """From now on; before, shapes are learned."""
        self._computes = True

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        if not self._computes:
            return super().forward_maybe_with_nosync(*args, **kwargs)
        return self._output

    def backward_maybe_with_nosync(self, backward_type: str, *args: Any, **kwargs: Any) -> Any:
        if not self._computes:
            return super().backward_maybe_with_nosync(backward_type, *args, **kwargs)
        return self._gradients, ([] if backward_type == "input" else None)


def torch_runtime(
    schedule: Schedule, rank: int, shape: tuple[int, ...]
) -> tuple[Any, list[_NoOpStage]]:
    """PyTorch's schedule object, and its stages of a rank, after a step that learned shapes."""
    stages = [
        _NoOpStage(index, schedule.num_stages, shape) for index in schedule.stages_of_rank(rank)
    ]
    loss = torch.zeros((), requires_grad=True) * 1
    learns = True

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return output.sum() if learns else loss

    runtime = build_pipeline_schedule(
        stages, num_microbatches=schedule.num_microbatches, name=schedule.name, loss_fn=loss_fn
    )
    step_torch(runtime, stages, schedule, shape)
    learns = False
    for stage in stages:
        stage.start_doing_nothing()
    return runtime, stages


def step_torch(
    runtime: Any, stages: Sequence[PipelineStage], schedule: Schedule, shape: tuple[int, ...]
) -> None:
    """One step of PyTorch's runtime, or of one on it, with the inputs that this rank has."""
    batch = torch.zeros(shape[0] * schedule.num_microbatches, *shape[1:])
    args = (batch,) if any(stage.is_first for stage in stages) else ()
    is_last = any(stage.is_last for stage in stages)
    runtime.step(
        *args,
        target=batch if is_last else None,
        losses=[] if is_last else None,
        return_outputs=False,  # ours returns losses alone, too
    )
