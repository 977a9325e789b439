"""What torchtitan calls a schedule: captured in training mode, and verified if that is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce

from gt_config import CompileConfig
from gt_pipeline.errors import PipelineStepError
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.runner import GraphPPRunner, MicrobatchInputs
from gt_pipeline.schedules import schedule_of
from gt_trainer.steps import pipelined_step
from gt_trainer.steps.pipelined_step import PipelinedStep
from gt_trainer.steps.program import TracingOptions
from gt_trainer.steps.program_step import CaptureSetup
from gt_trainer.steps.recipe import Recipe


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


def _no_activation(microbatch: MicrobatchInputs) -> Tensor:
    raise AssertionError("a pipeline of one stage was asked what travels")


def pipelined(module: nn.Module, **options: Any) -> PipelinedStep:
    return PipelinedStep(
        {0: module},
        schedule_of("GPipe", num_ranks=1, num_stages=1, num_microbatches=2),
        loss_fn=loss_fn,
        activation=_no_activation,
        pipeline_group=None,  # type: ignore[arg-type]  # a pipeline of one rank needs none
        recipe_of=lambda index: Recipe(options=CompileConfig()),
        device=torch.device("cpu"),
        setup=CaptureSetup(**options),
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
    pipelined(Model(), tracing=TracingOptions(verify=verify)).eval(**batch())
    assert asked == [verify]


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class WithPositions(Model):
    def forward(self, tokens: Tensor, *, positions: Tensor) -> Tensor:
        return self.embedding(tokens) * positions.unsqueeze(-1)


def batch_of_length(length: int) -> dict[str, Any]:
    tokens = torch.arange(length).remainder(5).unsqueeze(0)
    positions = torch.arange(length).unsqueeze(0)
    return {
        "arg_mbs": [(tokens,)] * 2,
        "kwarg_mbs": [{"positions": positions}] * 2,
        "target_mbs": [tokens.remainder(4)] * 2,
    }


def test_another_length_is_captured_once_if_asked():
    module = WithPositions()
    step = pipelined(module, on_shape_change="recapture")
    for length in (3, 7, 3, 7):
        given = batch_of_length(length)
        losses: list[Tensor] = []
        step.step(**given, losses=losses, loss_kwargs={"global_valid_tokens": torch.tensor(3)})
        found, module.embedding.weight.grad = module.embedding.weight.grad, None
        expected: list[Tensor] = []
        for args, kwargs, labels in zip(*given.values(), strict=True):
            loss, _ = loss_fn(module(*args, **kwargs), labels, torch.tensor(3))
            loss.backward()
            expected.append(loss.detach())
        assert torch.equal(torch.stack(losses), torch.stack(expected))
        assert torch.equal(found, module.embedding.weight.grad)
        module.embedding.weight.grad = None
        evaluated: list[Tensor] = []
        step.eval(**given, losses=evaluated)
        assert torch.allclose(torch.stack(evaluated), 3 * torch.stack(expected))
    assert len(step.reports) == 2
    step.close()


class Summed(Model):
    """Sums over a group that only its own code knows."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = super().forward(tokens)
        return embedded + all_reduce(embedded.detach(), "sum", self.group)


def test_a_failing_step_closes_whatever_groups_its_stages_communicate_in(
    world_of_one: None, monkeypatch: pytest.MonkeyPatch
):
    closed: list[Sequence[dist.ProcessGroup]] = []

    def runner(*args: Any, **options: Any) -> GraphPPRunner:
        closed.append(options["collective_groups"])
        return GraphPPRunner(*args, **options)

    monkeypatch.setattr(pipelined_step, "GraphPPRunner", runner)
    group = dist.new_group([0])
    assert isinstance(group, dist.ProcessGroup)
    step = pipelined(Summed(group))
    step.step(**batch(), losses=[], loss_kwargs={"global_valid_tokens": torch.tensor(3)})
    step.close()
    assert closed == [[group]]


def test_another_length_is_an_error_otherwise():
    step = pipelined(WithPositions())
    step.eval(**batch_of_length(3))
    with pytest.raises(PipelineStepError, match=r"args\[0\]: torch.int64 \[1, 7\], captured as"):
        step.eval(**batch_of_length(7))
