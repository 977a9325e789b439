"""PyTorch's pipeline runtime over stages that compute nothing.

Its stages keep what they do around a computation; the two methods that compute are replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Replicate, Shard

from gt_pipeline.schedules import Schedule, build_pipeline_schedule

__all__ = ["PEER_NAME", "Scale", "new_scale", "step_torch", "torch_runtime"]

PEER_NAME = "torch.distributed.pipelining"


class Scale(nn.Module):
    """What a stage would compute; PyTorch runs it once, to learn shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.factor


class PlacedScale(Scale):
    """The same of DTensors; a plain input is this rank's part of one, cut along its second dim."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._mesh = mesh
        factor = DTensor.from_local(self.factor.detach(), mesh, [Replicate()])
        self.factor = nn.Parameter(factor)

    def forward(self, hidden: Tensor) -> Tensor:
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, self._mesh, [Shard(1)])
        return hidden * self.factor


def new_scale(mesh: DeviceMesh | None) -> Scale:
    """What a stage would compute, on DTensors if there is a mesh."""
    return Scale() if mesh is None else PlacedScale(mesh)


class _NoOpStage(PipelineStage):
    def __init__(
        self, index: int, num_stages: int, shape: tuple[int, ...], mesh: DeviceMesh | None
    ) -> None:
        super().__init__(
            new_scale(mesh),
            index,
            num_stages,
            torch.device("cpu"),
            get_mesh=None if mesh is None else lambda axes, _: mesh,
        )
        activation = torch.zeros(shape)
        if mesh is not None:
            activation = DTensor.from_local(activation, mesh, [Shard(1)])
        self._output = activation.clone().requires_grad_() * 1
        self._gradients = (activation,)
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
    schedule: Schedule, rank: int, shape: tuple[int, ...], mesh: DeviceMesh | None = None
) -> tuple[Any, list[_NoOpStage]]:
    """PyTorch's schedule object, and its stages of a rank, after a step that learned shapes.

    With a mesh of tensor parallelism, activations are DTensors on it.
    """
    stages = [
        _NoOpStage(index, schedule.num_stages, shape, mesh)
        for index in schedule.stages_of_rank(rank)
    ]
    loss = torch.zeros((), requires_grad=True) * 1
    learns = True

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if not learns:
            return loss
        total = output.sum()
        return total.full_tensor() if isinstance(total, DTensor) else total

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
