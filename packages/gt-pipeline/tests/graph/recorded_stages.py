"""Stages whose recordings are imitated, and steps of them that can be compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from recording_transform import recording
from stage_models import CountingBlock, squared_error
from torch import Tensor

from gt_passes.testing import FakeRecorder
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.runner import GraphPPRunner, MicrobatchInputs
from gt_pipeline.schedules import Schedule, schedule_of

NUM_MICROBATCHES = 6
NUM_STEPS = 5
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")


def inputs_of_a_microbatch() -> MicrobatchInputs:
    return MicrobatchInputs(args=(torch.randn(4, 8),), target=torch.randn(4, 8))


def new_stages(num_stages: int, recorder: FakeRecorder | None) -> list[GraphPipelineStage]:
    torch.manual_seed(0)
    modules = [CountingBlock() for _ in range(num_stages)]
    stages: list[GraphPipelineStage] = []
    for index, module in enumerate(modules):
        stages.append(
            GraphPipelineStage(
                module,
                stage_index=index,
                num_stages=num_stages,
                activations=stages[-1].output_signature if stages else (),
                inputs=inputs_of_a_microbatch(),
                loss_fn=squared_error if index == num_stages - 1 else None,
                fake_mode=stages[-1].fake_mode if stages else None,
                transform=None if recorder is None else recording(recorder),
            )
        )
    return stages


def trained(
    stages: list[GraphPipelineStage], name: str, *, after_step: Callable[[], None] = lambda: None
) -> list[list[Tensor]]:
    """Losses, gradients and buffers of each step; parameters change in between."""
    planned = planned_schedule(name, len(stages))
    generator = torch.Generator().manual_seed(1)
    steps = []
    with GraphPPRunner(stages, planned) as runner:
        for _ in range(NUM_STEPS):
            x = torch.randn(4 * NUM_MICROBATCHES, 8, generator=generator)
            result = runner.step(x, target=x.roll(1, dims=0))
            found = [*result.losses]
            for stage in stages:
                for parameter in stage.parameters().values():
                    assert parameter.grad is not None
                    found.append(parameter.grad)
                    parameter.data.sub_(parameter.grad, alpha=0.1)
                    parameter.grad = None
                found.append(stage._module.seen.clone())
            steps.append(found)
            after_step()
    return steps


def planned_schedule(name: str, num_stages: int) -> Schedule:
    return schedule_of(name, num_ranks=1, num_stages=num_stages, num_microbatches=NUM_MICROBATCHES)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def same_steps(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    return all(all(map(same_bits, one, other)) for one, other in zip(a, b, strict=True))
