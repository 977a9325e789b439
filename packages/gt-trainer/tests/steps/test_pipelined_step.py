"""What torchtitan calls a schedule: captured in training mode, and verified if that is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gt_config import CompileConfig
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.runner import ActivationSignature
from gt_pipeline.schedules import schedule_of
from gt_trainer.steps import pipelined_step
from gt_trainer.steps.pipelined_step import PipelinedStep
from gt_trainer.steps.stage_recipe import StagePasses


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.drop(self.embedding(tokens))


def loss_fn(
    prediction: Tensor, labels: Tensor, global_valid_tokens: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    one_hot = nn.functional.one_hot(labels, 4)
    return (prediction - one_hot).square().sum() / global_valid_tokens, {}


def pipelined(module: nn.Module, **options: Any) -> PipelinedStep:
    return PipelinedStep(
        {0: module},
        schedule_of("GPipe", num_ranks=1, num_stages=1, num_microbatches=2),
        loss_fn=loss_fn,
        activation=ActivationSignature(shape=(2, 4), dtype=torch.float32, requires_grad=True),
        pipeline_group=None,  # type: ignore[arg-type]  # a pipeline of one rank needs none
        collective_groups=[],
        new_passes=lambda index: StagePasses(CompileConfig()),
        device=torch.device("cpu"),
        **options,
    )


def batch() -> dict[str, Any]:
    tokens = torch.tensor([[0, 1, 2]])
    return {"arg_mbs": [(tokens,)] * 2, "target_mbs": [tokens] * 2}


def test_a_validation_that_comes_first_leaves_training_with_its_dropout():
    module = Model()
    step = pipelined(module)
    module.eval()
    losses: list[Tensor] = []
    step.eval(**batch(), losses=losses)
    assert not module.drop.training
    assert torch.equal(losses[0], losses[1])
    module.train()
    losses = []
    step.step(**batch(), losses=losses, loss_kwargs={"global_valid_tokens": torch.tensor(3)})
    assert not torch.equal(losses[0], losses[1])
    assert module.embedding.weight.grad is not None


@pytest.mark.parametrize("verify", [True, False])
def test_verification_of_passes_reaches_the_stages(monkeypatch: pytest.MonkeyPatch, verify: bool):
    asked: list[object] = []

    def stage(*args: Any, **options: Any) -> GraphPipelineStage:
        asked.append(options["verify"])
        return GraphPipelineStage(*args, **options)

    monkeypatch.setattr(pipelined_step, "GraphPipelineStage", stage)
    pipelined(Model(), verify=verify).eval(**batch())
    assert asked == [verify]
