"""torchtitan's own attention in stages and in joint graphs: compiled FlexAttention, a mask a batch.

It is what its language models have where there is a GPU. FlexAttention refuses CPU tensors that
require a gradient; without that refusal the model and what is captured of it run the same dense
implementation here, and are compared to the bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.llama3 import model_registry

from gt_config import CompileConfig
from gt_config.graph_kinds import GraphKind
from gt_passes import PassContext, PassManager, RemoveDeadCode
from gt_pipeline.runner import ActivationSignature
from gt_pipeline.schedules import schedule_of
from gt_pipeline.split import stage_modules
from gt_trace import flex_attention_on_cpu
from gt_trainer.steps.pipelined_step import PipelinedStep
from gt_trainer.steps.program_step import CaptureSetup, JointStep
from gt_trainer.steps.recipe import Recipe

LENGTH, NUM_MICROBATCHES = 32, 2


@pytest.fixture(scope="module", autouse=True)
def cpu_trains() -> Iterator[None]:
    with flex_attention_on_cpu():
        yield


@pytest.fixture(scope="module")
def model() -> Decoder:
    """Two layers of torchtitan's debug model."""
    config: Any = model_registry("debugmodel").model
    config = dataclasses.replace(config, layers=config.layers[:2])
    torch.manual_seed(0)
    built = config.build()
    built.init_states()
    assert isinstance(built.layers["0"].attention.inner_attention, FlexAttention)
    return built


def loss_fn(logits: Tensor, labels: Tensor, valid: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return losses / valid, {}


def batch(model: Decoder, seed: int, *, samples: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Tokens, labels, and what torchtitan's trainer gives besides; documents begin anywhere."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(samples, LENGTH, generator=generator) < 0.2
    starts[:, 0] = True
    here = torch.arange(LENGTH).expand_as(starts)
    positions = here - torch.where(starts, here, 0).cummax(1).values
    tokens, labels = torch.randint(0, 100, (2, samples, LENGTH), generator=generator)
    with torch.compiler.set_stance("force_eager"):
        mask = model.get_attention_masks(positions)
    return tokens, labels, {"positions": positions, "attention_masks": mask}


def eager(
    model: Decoder, tokens: Tensor, labels: Tensor, kwargs: dict[str, Any], valid: Tensor
) -> Tensor:
    with torch.compiler.set_stance("force_eager"):
        loss, _ = loss_fn(model(tokens, **kwargs), labels, valid)
        loss.backward()
    return loss.detach()


def taken_gradients(*modules: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            found[name] = parameter.grad
            parameter.grad = None
    return found


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("samples", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stages_compute_what_the_whole_model_does(model: Decoder, samples: int) -> None:
    names = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]
    parts = stage_modules(model, names, [0, 1])
    step = PipelinedStep(
        parts,
        schedule_of("ZBVZeroBubble", num_ranks=1, num_stages=2, num_microbatches=NUM_MICROBATCHES),
        loss_fn=loss_fn,
        activation=lambda microbatch: ActivationSignature(
            shape=(samples, LENGTH, model.config.dim), dtype=torch.float32, requires_grad=True
        ),
        pipeline_group=None,  # type: ignore[arg-type]  # a pipeline of one rank needs none
        recipe_of=lambda index: Recipe(options=CompileConfig(memory_policy="selective")),
        device=torch.device("cpu"),
    )
    valid = torch.tensor(NUM_MICROBATCHES * samples * LENGTH)
    for number in range(2):
        microbatches = [
            batch(model, NUM_MICROBATCHES * number + i, samples=samples)
            for i in range(NUM_MICROBATCHES)
        ]
        losses: list[Tensor] = []
        step.step(
            arg_mbs=[(tokens,) for tokens, _, _ in microbatches],
            kwarg_mbs=[kwargs for _, _, kwargs in microbatches],
            target_mbs=[labels for _, labels, _ in microbatches],
            losses=losses,
            loss_kwargs={"valid": valid},
        )
        expected = [eager(model, *each, valid) for each in microbatches]
        assert torch.equal(torch.stack(losses), torch.stack(expected))
        assert_same(taken_gradients(*parts.values()), taken_gradients(model))


def test_joint_graphs_compute_what_the_model_does(model: Decoder) -> None:
    forward = JointStep(
        model, loss_fn, recipe=_clean_up, preparation=None, setup=CaptureSetup()
    ).forward
    valid = torch.tensor(2 * LENGTH)
    for seed in range(2):
        tokens, labels, kwargs = batch(model, seed, samples=2)
        loss, _ = loss_fn(forward(tokens, **kwargs), labels, valid)
        loss.backward()
        gradients = taken_gradients(model)
        assert torch.equal(loss, eager(model, tokens, labels, kwargs, valid))
        assert_same(gradients, taken_gradients(model))


def _clean_up(context: PassContext, graph: GraphKind) -> PassManager:
    return PassManager([RemoveDeadCode()], context=context)
