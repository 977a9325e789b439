"""Tiny models of repeated layers, and their training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gt_trace import trace_step
from gt_trace.stamping import step_differences, trace_step_by_stamping
from gt_trace.stamping.report import StampedCapture

WIDTH = 4
VOCABULARY = 7


class Block(nn.Module):
    """A residual layer with a place for everything that may differ between layers."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)
        self.activation: nn.Module = nn.ReLU()
        self.dropout = nn.Dropout(0.0)
        self.register_buffer("gain", torch.ones(1))
        self.factors = [1.0, 0.5]
        self.options: dict[str, Any] = {"scale": 2.0, "nested": (1, [3])}
        self.shift: Callable[[Tensor], Tensor] = shifted_by(0.25)

    @property
    def half(self) -> float:
        return 0.5

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.activation(self.up(x)))
        y = self.shift(self.down(hidden) * self.factors[1] * self.options["scale"])
        return x + y * self.half * self.gain.to(x.dtype)


def shifted_by(amount: float) -> Callable[[Tensor], Tensor]:
    def shift(x: Tensor) -> Tensor:
        return x + amount

    return shift


class Toy(nn.Module):
    """Embedding, layers, projection."""

    def __init__(
        self, num_layers: int = 6, block: Callable[[], nn.Module] = Block, tied: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers: Any = nn.ModuleList(block() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.run_layers(self.embedding(tokens)))

    def run_layers(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def step_of(model: nn.Module) -> Callable[[Tensor], Any]:
    def step(tokens: Tensor) -> Any:
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        wanted = [p for p in model.parameters() if p.requires_grad]
        return loss, torch.autograd.grad(loss, wanted, allow_unused=True)

    return step


def tokens() -> Tensor:
    return torch.arange(6).reshape(2, 3)


def stamp(
    model: nn.Module,
    step: Callable[..., Any] | None = None,
    *,
    known_functions: frozenset[str] = frozenset(),
) -> StampedCapture:
    capture = trace_step_by_stamping(
        step or step_of(model), module=model, known_functions=known_functions
    )
    return capture(tokens())


def differences(
    model: nn.Module, captured: StampedCapture, step: Callable[..., Any] | None = None
) -> list[str]:
    """Between a capture and the one that traces every layer."""
    full = trace_step(step or step_of(model), module=model)(tokens())
    return step_differences(captured.step, full)
