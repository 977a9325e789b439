"""Small models for the tests of memory passes, captured as whole training steps."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn import functional as F

from gt_passes import GraphPass, PassContext, PassManager, PassManagerReport
from gt_passes.analysis.liveness import estimate_peak_bytes
from gt_trace.capture.bound_inputs import BoundInputs
from gt_trace.capture.trace import trace_step
from gt_trace.capture.traced_step import TracedStep

VOCAB = 32


class Mlp(nn.Module):
    """The smallest layer of which two parts are expensive, ``mm``, and one is not, ``silu``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(dim, 2 * dim) / dim**0.5)
        self.down = nn.Parameter(torch.randn(2 * dim, dim) / dim**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x @ self.up) @ self.down


class Norm(nn.Module):
    """As models write it: with an in-place operator on a value that nobody else reads."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True).add_(1e-5)) * self.weight


class Block(nn.Module):
    """A transformer layer: attention and a gated feed-forward, with dropout."""

    def __init__(self, dim: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention_norm, self.ffn_norm = Norm(dim), Norm(dim)
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.w1, self.w3 = (nn.Linear(dim, 2 * dim, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.wqkv(self.attention_norm(x)).unflatten(-1, (-1, 3, 8)).transpose(1, 2)
        q, k, v = heads.unbind(3)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.wo(attended.transpose(1, 2).flatten(2)), self.dropout)
        hidden = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(hidden)) * self.w3(hidden))


class Stack(nn.Module):
    """Layers one after the other, on vectors."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Decoder(nn.Module):
    """Layers between an embedding and a prediction."""

    def __init__(self, layers: Sequence[nn.Module], *, dim: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(layers)
        self.norm = Norm(dim)
        self.output = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A captured step, with what it takes to run it."""

    step: TracedStep
    model: nn.Module
    args: tuple[torch.Tensor, ...]

    @property
    def graph_module(self) -> GraphModule:
        return self.step.graph_module

    @property
    def context(self) -> PassContext:
        static = self.step.inputs[: self.step.num_static_inputs]
        names = tuple(graph_input.name for graph_input in static)
        return PassContext(fake_mode=self.step.fake_mode, static_input_names=names)

    def plain_inputs(self) -> tuple[object, ...]:
        """What the placeholders take."""
        return tuple(BoundInputs(self.step, self.model, None).plain_tensors(self.args, {}))

    def outputs(self, executable: Callable[..., object] | None = None) -> list[torch.Tensor]:
        """Loss and gradients, with the random numbers of one seed."""
        torch.manual_seed(5)
        with torch.no_grad():
            return list((executable or self.graph_module)(*self.plain_inputs()))


def capture_stack(layers: Sequence[nn.Module] | None = None, *, dim: int = 4) -> Captured:
    """A step on vectors, by default of two layers."""
    torch.manual_seed(0)
    model = Stack([Mlp(dim) for _ in range(2)] if layers is None else layers)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        loss = model(x).square().mean()
        return loss, torch.autograd.grad(loss, tuple(model.parameters()))

    args = (torch.randn(8, dim),)
    return Captured(step=trace_step(step, module=model)(*args), model=model, args=args)


def capture_decoder(*, num_layers: int = 3, dropout: float = 0.0) -> Captured:
    """A step of a language model. Captured once, and copied for every caller."""
    captured = _capture_decoder(num_layers, dropout)
    graph_module = copy.deepcopy(captured.graph_module)
    step = dataclasses.replace(captured.step, graph_module=graph_module)
    return dataclasses.replace(captured, step=step)


@functools.cache
def _capture_decoder(num_layers: int, dropout: float) -> Captured:
    torch.manual_seed(0)
    model = Decoder([Block(32, dropout=dropout) for _ in range(num_layers)], dim=32)

    def step(
        tokens: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        return loss, torch.autograd.grad(loss, tuple(model.parameters()))

    args = (torch.randint(0, VOCAB, (2, 24)), torch.randint(0, VOCAB, (2, 24)))
    return Captured(step=trace_step(step, module=model)(*args), model=model, args=args)


def run(captured: Captured, *passes: GraphPass) -> PassManagerReport:
    """Run passes as the pass manager does: verified, and held to their bounds."""
    manager = PassManager(passes, context=captured.context, estimate_peak_bytes=estimate_peak_bytes)
    return manager.run(captured.graph_module)
