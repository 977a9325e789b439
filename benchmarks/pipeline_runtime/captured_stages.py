"""Captured stages whose graphs are not run: what a stage does around them is left.

A graph of an action is one call, whatever is inside: EP overlap, compiled regions and chunks change
nothing here. So the calls give what they gave when they last ran.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from gt_pipeline.graph import ActivationPlacement, GraphPipelineStage
from gt_pipeline.graph.executables import Executable
from gt_pipeline.runner import ActivationSignature, GraphPPRunner, MicrobatchInputs
from gt_pipeline.schedules import Schedule
from pipeline_runtime.torch_stages import new_scale

__all__ = ["captured_runner"]


def captured_runner(
    schedule: Schedule, rank: int, shape: tuple[int, ...], tensor_parallel: DeviceMesh | None
) -> GraphPPRunner:
    """A runner over the captured stages of a rank, after a step in which their graphs ran.

    Args:
        schedule: to run.
        rank: of the pipeline.
        shape: of a microbatch's activation.
        tensor_parallel: the axis over which activations and parameters are placed, if they are.
    """
    signature = ActivationSignature(shape=shape, dtype=torch.float32, requires_grad=True)
    activation: Tensor | ActivationSignature = signature
    inputs = MicrobatchInputs(args=(torch.zeros(shape),), target=torch.zeros(shape))
    if tensor_parallel is not None:
        placement = ActivationPlacement(mesh_axes=("tp",), placements=(Shard(1),), shape=shape)
        activation = placement.example(signature, tensor_parallel)
    stages: list[GraphPipelineStage] = []
    for index in schedule.stages_of_rank(rank):
        stages.append(
            GraphPipelineStage(
                new_scale(tensor_parallel),
                stage_index=index,
                num_stages=schedule.num_stages,
                activations=() if index == 0 else (activation,),
                inputs=inputs,
                loss_fn=_loss if index == schedule.num_stages - 1 else None,
                fake_mode=stages[-1].fake_mode if stages else None,
            )
        )
    runner = GraphPPRunner(stages, schedule)
    batch = torch.zeros(shape[0] * schedule.num_microbatches, *shape[1:])
    executables = [
        each
        for stage in stages
        for each in (
            *stage._executables.computing.values(),
            *(pair for _, pair in stage._executables.pairs.values()),
        )
    ]
    last_results = [_watch(each) for each in executables]
    runner.step(batch, target=batch)
    for each, results in zip(executables, last_results, strict=True):
        _stop_running(each, results)
    return runner


def _watch(executable: Executable) -> list[Tensor]:
    """A list that has what the graph gives, whenever it has run."""
    run, results = executable._run, []

    def watched(inputs: list[Tensor]) -> list[Tensor]:
        results[:] = run(inputs)
        return [*results]

    executable._run = watched
    return results


def _stop_running(executable: Executable, results: Sequence[Tensor]) -> None:
    """Let the graph give those results from now on; never, if it did not run."""

    def nothing(inputs: list[Tensor]) -> list[Tensor]:
        inputs.clear()
        return [*results]

    executable._run = nothing


def _loss(prediction: Tensor, target: Tensor) -> Tensor:
    total = prediction.sum()
    return total.full_tensor() if isinstance(total, DTensor) else total
