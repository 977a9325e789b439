"""Small models that the tests of gt-trace capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gt_trace import phase


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class TiedModel(nn.Module):
    """Embedding and output share one weight; a buffer counts the calls."""

    def __init__(self, vocab: int = 16, dim: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([Block(dim), Block(dim)])
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def step_of(model: nn.Module) -> Callable[..., tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
    """Loss and gradients of ``model`` on (tokens, labels), both (B, L)."""

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = model(tokens)
        with phase("loss"):
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    return step


def batch(seed: int, shape: tuple[int, int] = (2, 4)) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels from that seed."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, 16, shape, generator=generator),
        torch.randint(0, 16, shape, generator=generator),
    )


def assert_same(actual: Any, expected: Any) -> None:
    """Equal to the last bit: a loss and a tuple of gradients."""
    assert torch.equal(actual[0], expected[0])
    assert len(actual[1]) == len(expected[1])
    for mine, theirs in zip(actual[1], expected[1], strict=True):
        assert torch.equal(mine, theirs)
