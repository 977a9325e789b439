"""A small decoder, captured as a whole step. Attention is written out, so that it is deterministic."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from gpu.sites import Site
from torch import nn
from torch.nn import functional as F

from gt_config import CompileConfig, MemoryPolicy
from gt_passes import (
    GraphPass,
    PassContext,
    PassManager,
    PassManagerReport,
    TagSavedTensors,
    default_passes,
)
from gt_trace.capture.bound_inputs import BoundInputs
from gt_trace.capture.trace import trace_step
from gt_trace.capture.traced_step import TracedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    dim: int
    num_heads: int
    num_layers: int
    vocab: int
    batch: int
    seq: int

    @classmethod
    def of(cls, site: Site) -> Sizes:
        """Activations of about 2 GiB on a GPU, and what a CPU computes at once."""
        if site.large:
            return cls(dim=1024, num_heads=8, num_layers=6, vocab=4096, batch=8, seq=512)
        return cls(dim=32, num_heads=2, num_layers=3, vocab=32, batch=2, seq=12)


class Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Block(nn.Module):
    def __init__(self, sizes: Sizes, *, dropout: float) -> None:
        super().__init__()
        dim = sizes.dim
        self.num_heads, self.dropout = sizes.num_heads, dropout
        self.attention_norm, self.ffn_norm = Norm(dim), Norm(dim)
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.w1, self.w3 = (nn.Linear(dim, 2 * dim, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * dim, dim, bias=False)
        mask = torch.full((sizes.seq, sizes.seq), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.wqkv(self.attention_norm(x)).unflatten(-1, (self.num_heads, 3, -1))
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(3))
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5 + self.mask
        attended = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.wo(attended), self.dropout)
        hidden = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(hidden)) * self.w3(hidden))


class Decoder(nn.Module):
    def __init__(self, sizes: Sizes, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(sizes.vocab, sizes.dim)
        self.layers = nn.ModuleList(Block(sizes, dropout=dropout) for _ in range(sizes.num_layers))
        self.norm = Norm(sizes.dim)
        self.output = nn.Linear(sizes.dim, sizes.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


Batch = tuple[torch.Tensor, torch.Tensor]
StepFn = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, tuple[torch.Tensor, ...]]]


def decoder(site: Site, *, dropout: float = 0.0) -> Decoder:
    """The same weights every time."""
    torch.manual_seed(7)
    return Decoder(Sizes.of(site), dropout=dropout).to(site.device)


def batches(site: Site, number: int) -> Iterator[Batch]:
    """Tokens and labels, (B, L) each."""
    sizes = Sizes.of(site)
    generator = torch.Generator().manual_seed(11)
    for _ in range(number):
        tokens = torch.randint(sizes.vocab, (2, sizes.batch, sizes.seq), generator=generator)
        yield tokens[0].to(site.device), tokens[1].to(site.device)


def eager_step(model: nn.Module) -> StepFn:
    """Loss and gradients, operator by operator."""

    def step(
        tokens: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        return loss, torch.autograd.grad(loss, tuple(model.parameters()))

    return step


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """A captured step after passes, and a model to run it on."""

    step: TracedStep
    model: nn.Module
    report: PassManagerReport

    def bound(self) -> Any:
        return self.step.bind(self.model)

    def plain_inputs(self, *args: torch.Tensor) -> tuple[object, ...]:
        """What the placeholders of the graph take."""
        return tuple(BoundInputs(self.step, self.model, None).plain_tensors(args, {}))

    def counts(self, name: str) -> dict[str, int]:
        """What one pass counted."""
        (record,) = (each for each in self.report.records if each.name == name)
        return dict(record.report.counts)

    def refusals(self, name: str) -> list[str]:
        (record,) = (each for each in self.report.records if each.name == name)
        return list(map(str, record.report.refusals))


def captured_step(
    site: Site, model: nn.Module, *, passes: list[GraphPass] | None = None
) -> CapturedStep:
    """Capture a step of ``model``, and run passes on it, verified after each."""
    ((tokens, labels),) = batches(site, 1)
    step = trace_step(eager_step(model), module=model)(tokens, labels)
    context = PassContext.of_step(step)
    report = PassManager(passes or [], context=context).run(step.graph_module)
    return CapturedStep(step=step, model=model, report=report)


def recipe(
    site: Site,
    *,
    memory_policy: MemoryPolicy = "save_all",
    inductor_compilation: str = "none",
    recorded: bool = False,
) -> list[GraphPass]:
    """The passes of a configuration, as a run gets them; every saved tensor may be offloaded."""
    options = CompileConfig(
        memory_policy=memory_policy,
        inductor_compilation=inductor_compilation,  # type: ignore[arg-type]  # a name of a test
    )
    passes = list(default_passes(options, graph="STEP", compiler=site.compiler))
    passes = [
        TagSavedTensors(policy=each.policy, saved_ops=each.saved_ops,
            recompute_collectives=each.recompute_collectives, offload_min_bytes=1)
        if isinstance(each, TagSavedTensors)
        else each
        for each in passes
    ]  # fmt: skip
    return [*passes, site.cuda_graphs()] if recorded else passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What some optimizer steps led to."""

    losses: list[torch.Tensor]
    parameters: list[torch.Tensor]

    def differences(self, other: Trained) -> list[str]:
        """What is not the same to the bit."""
        named = {
            "loss": (self.losses, other.losses),
            "parameter": (self.parameters, other.parameters),
        }
        return [
            f"{name} {number}"
            for name, (ours, theirs) in named.items()
            for number, (a, b) in enumerate(zip(ours, theirs, strict=True))
            if not torch.equal(a, b)
        ]


def train(site: Site, step: StepFn, model: nn.Module, *, num_steps: int = 5) -> Trained:
    """Steps of AdamW, each on a batch of its own."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for tokens, labels in batches(site, num_steps):
        loss, gradients = step(tokens, labels)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        losses.append(loss.detach().clone())
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    return Trained(losses=losses, parameters=parameters)


def same_model(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)
