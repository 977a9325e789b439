"""A small language model, whole and in stages, and what training it in one process computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from eager_stage import EagerStage
from torch import Tensor, nn
from torch.nn import functional

from gt_pipeline.runner import ActivationSignature
from gt_pipeline.schedules import Schedule

VOCABULARY, HIDDEN, SEQUENCE = 11, 16, 5
NUM_MICROBATCHES, MICROBATCH_SIZE = 8, 2


class Block(nn.Module):
    """Keeps the shape of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.down = nn.Linear(3 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class Toy(nn.Module):
    """An embedding, one block for each stage, and a head; a stage has None for what it lacks."""

    def __init__(self, num_blocks: int, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding: nn.Embedding | None = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleDict({str(index): Block() for index in range(num_blocks)})
        self.head: nn.Linear | None = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, hidden: Tensor) -> Tensor:
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        for block in self.blocks.values():
            hidden = block(hidden)
        return hidden if self.head is None else self.head(hidden)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Mean over the microbatch's tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def toy(num_stages: int, *, tied: bool = False) -> Toy:
    """The same values in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Toy(num_stages, tied=tied)


def stage_module(whole: Toy, index: int, num_stages: int) -> Toy:
    """One stage of a model, under the model's names; takes the parameters out of it."""
    stage = Toy(0)
    stage.embedding = whole.embedding if index == 0 else None
    stage.head = whole.head if index == num_stages - 1 else None
    stage.blocks = nn.ModuleDict({str(index): whole.blocks[str(index)]})
    return stage


ACTIVATION = ActivationSignature(
    shape=(MICROBATCH_SIZE, SEQUENCE, HIDDEN), dtype=torch.float32, requires_grad=True
)


def eager_stages(schedule: Schedule, rank: int, *, whole: Toy | None = None) -> list[EagerStage]:
    """The stages that a schedule has on a rank."""
    num_stages = schedule.num_stages
    whole = toy(num_stages) if whole is None else whole
    return [
        EagerStage(
            stage_module(whole, index, num_stages),
            stage_index=index,
            num_stages=num_stages,
            activation=ACTIVATION,
            loss_fn=loss_fn if index == num_stages - 1 else None,
        )
        for index in schedule.stages_of_rank(rank)
    ]


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and targets of all microbatches."""
    generator = torch.Generator().manual_seed(step)
    shape = (NUM_MICROBATCHES * MICROBATCH_SIZE, SEQUENCE)
    return (
        torch.randint(VOCABULARY, shape, generator=generator),
        torch.randint(VOCABULARY, shape, generator=generator),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What training steps leave: the last step's losses and all gradients, by name."""

    losses: tuple[Tensor, ...]
    gradients: dict[str, Tensor]


def train_in_one_process(
    num_stages: int,
    *,
    num_steps: int = 1,
    loss_gradient: float = 1 / NUM_MICROBATCHES,
    model: Toy | None = None,
) -> Trained:
    """Eager steps of the whole model, microbatch by microbatch, without a pipeline."""
    model = toy(num_stages) if model is None else model
    losses: list[Tensor] = []
    for step in range(num_steps):
        losses = []
        # As one step of a pipeline does, add a step's whole gradient to what was there.
        before = {name: each.grad for name, each in model.named_parameters()}
        model.zero_grad()
        for tokens, target in zip(
            *(each.chunk(NUM_MICROBATCHES) for each in batch(step)), strict=True
        ):
            loss = loss_fn(model(tokens), target)
            loss.backward(torch.tensor(loss_gradient))
            losses.append(loss.detach())
        for name, parameter in model.named_parameters():
            if (old := before[name]) is not None and parameter.grad is not None:
                parameter.grad = old + parameter.grad
    return Trained(losses=tuple(losses), gradients=gradients_of([model]))


def gradients_of(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Gradients of all parameters that have one."""
    return {
        name: parameter.grad
        for module in modules
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
