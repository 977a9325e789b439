"""The layers that steps are made of: each takes and gives (B, L, D).

A kind is a class and a function that draws its options. Between them they cover what passes look at:
parameters read once, twice, and not at all; padding; saved and random values; buffers written in
place; collectives of tensor and expert parallelism, with splits known when tracing or not; and
operators of which nothing is known.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fuzz.case import PartSpec
from fuzz.custom_ops import observe, scale_
from fuzz.exchanges import all_gather, all_reduce, all_to_all, reduce_scatter
from fuzz.tensor_program import draw_program, run_program
from gt_config.node_keys import EpExchangeAnnotation, EpRegionAnnotation
from gt_trace.annotate import annotate

__all__ = ["PART_KINDS", "Part", "build_part", "draw_part"]

_HIDDEN = (3, 4, 5, 6, 8)


class Part(nn.Module):
    """A layer.

    Args:
        dim: features.
        group: name of the group, of 2 ranks, over which the layer communicates.
        options: of the kind.
    """

    def __init__(self, dim: int, group: str, **options: Any) -> None:
        super().__init__()
        self.group = group
        self.returned: list[torch.Tensor] = []
        """Further results of the step, besides what flows to the next layer."""
        self.build(dim, **options)

    @abstractmethod
    def build(self, dim: int, **options: Any) -> None:
        """Make the parameters and buffers."""

    @staticmethod
    def draw(source: random.Random) -> dict[str, Any]:
        """Random options of the kind."""
        return {}


class Linear(Part):
    """Up, a nonlinearity, and down. Odd extents are padded when sharded."""

    def build(self, dim: int, *, hidden: int, bias: bool, frozen: bool, activation: str) -> None:
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)
        self.down.weight.requires_grad_(not frozen)
        self.activation: Callable[..., torch.Tensor] = {
            "relu": F.relu,
            "relu_": F.relu_,
            "gelu": F.gelu,
            "silu": F.silu,
            "tanh": torch.tanh,
        }[activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(self.activation(self.up(x)))
        return result

    @staticmethod
    def draw(source: random.Random) -> dict[str, Any]:
        return {
            "hidden": source.choice(_HIDDEN),
            "bias": source.random() < 0.5,
            "frozen": source.random() < 0.15,
            "activation": source.choice(["relu", "relu_", "gelu", "silu", "tanh"]),
        }


class Norm(Part):
    """Layer norm or RMS norm."""

    def build(self, dim: int, *, rms: bool) -> None:
        self.norm: nn.Module = nn.RMSNorm(dim) if rms else nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(x)
        return result

    @staticmethod
    def draw(source: random.Random) -> dict[str, Any]:
        return {"rms": source.random() < 0.5}


class Attention(Part):
    """Causal attention of one head or two."""

    def build(self, dim: int, *, split_heads: bool, dropout: float) -> None:
        self.project = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.num_heads = 2 if split_heads and dim % 2 == 0 else 1
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for t in self.project(x).chunk(3, dim=-1)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=self.dropout)
        result: torch.Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return result

    @staticmethod
    def draw(source: random.Random) -> dict[str, Any]:
        return {"split_heads": source.random() < 0.5, "dropout": source.choice([0.0, 0.0, 0.2])}


class Dropout(Part):
    """Random, and saved for backward."""

    def build(self, dim: int, *, p: float) -> None:
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.p, training=True)

    @staticmethod
    def draw(source: random.Random) -> dict[str, Any]:
        return {"p": source.choice([0.0, 0.25, 0.5])}


class Noise(Part):
    """Random numbers of which backward sees nothing."""

    def build(self, dim: int) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.randn_like(x)


class Counter(Part):
    """A buffer that counts its calls, read before or after it is written."""

    def build(self, dim: int, *, read_first: bool) -> None:
        self.register_buffer("calls", torch.ones(()))
        self.read_first = read_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        calls = self.calls.clone() if self.read_first else self.calls.add_(1).clone()
        if self.read_first:
            self.calls.add_(1)
        return x * calls.reciprocal()

    @staticmethod
    def draw(source: random.Random) -> dict[str, Any]:
        return {"read_first": source.random() < 0.5}


class RunningMean(Part):
    """A buffer that follows the mean of what passes by, perhaps that of all ranks."""

    def build(self, dim: int, *, synchronized: bool) -> None:
        self.register_buffer("mean", torch.zeros(dim))
        self.synchronized = synchronized

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().float().mean(dim=(0, 1))
        if self.synchronized:
            mean = all_reduce(mean, self.group) / 2
        self.mean.lerp_(mean, 0.5)
        return x - self.mean.clone().to(x.dtype)

    @staticmethod
    def draw(source: random.Random) -> dict[str, Any]:
        return {"synchronized": source.random() < 0.5}


class Repeated(Part):
    """One linear layer called several times: its weight is read as often in one forward."""

    def build(self, dim: int, *, times: int, transposed: bool) -> None:
        self.linear = nn.Linear(dim, dim)
        self.times = times
        self.transposed = transposed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = x + torch.tanh(self.linear(x))
        return x + x @ self.linear.weight if self.transposed else x

    @staticmethod
    def draw(source: random.Random) -> dict[str, Any]:
        return {"times": source.choice([1, 2, 3]), "transposed": source.random() < 0.5}


class Unused(Part):
    """A parameter that nothing depends on, or that is read and then forgotten."""

    def build(self, dim: int, *, read: bool) -> None:
        self.weight = nn.Parameter(torch.randn(dim, dim))
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.read:
            (x @ self.weight).sum()
        return x

    @staticmethod
    def draw(source: random.Random) -> dict[str, Any]:
        return {"read": source.random() < 0.5}


class TensorParallel(Part):
    """Gather along the batch, an MLP, and scatter the sum; or sum where everybody has all rows."""

    def build(self, dim: int, *, hidden: int, sequence_parallel: bool) -> None:
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.sequence_parallel = sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.sequence_parallel:
            result: torch.Tensor = x + all_reduce(self.down(F.gelu(self.up(x))), self.group)
            return result
        gathered = all_gather(x, self.group)
        return x + reduce_scatter(self.down(F.gelu(self.up(gathered))), self.group)

    @staticmethod
    def draw(source: random.Random) -> dict[str, Any]:
        return {"hidden": source.choice(_HIDDEN), "sequence_parallel": source.random() < 0.6}


class EvenExperts(Part):
    """Half of the rows go to the other rank's expert and back."""

    def build(self, dim: int, *, hidden: int) -> None:
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        with annotate(EpRegionAnnotation(kind="dispatch")):
            routed = all_to_all(rows, (), (), self.group)
        with annotate(EpRegionAnnotation(kind="compute")):
            computed = self.down(F.silu(self.up(routed)))
        with annotate(EpRegionAnnotation(kind="combine")):
            combined = all_to_all(computed, (), (), self.group)
        return x + combined.view_as(x)

    @staticmethod
    def draw(source: random.Random) -> dict[str, Any]:
        return {"hidden": source.choice(_HIDDEN)}


class RoutedExperts(Part):
    """Each row goes to the rank that a router names: the splits depend on the data."""

    def build(self, dim: int, *, hidden: int, count_rows: bool) -> None:
        self.router = nn.Linear(dim, 2, bias=False)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)
        self.count_rows = count_rows
        self.register_buffer("rows_per_rank", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        scores, chosen = self.router(rows).softmax(-1).max(-1)
        with annotate(EpRegionAnnotation(kind="dispatch")):
            order = torch.argsort(chosen, stable=True)
            counts = F.one_hot(chosen, 2).sum(0)
            if self.count_rows:
                self.rows_per_rank.add_(counts)
            with annotate(EpExchangeAnnotation(kind="token_count_exchange")):
                their_counts = all_to_all(counts, (), (), self.group)
            given, taken = counts.tolist(), their_counts.tolist()
            for size in (*given, *taken):
                torch._check(size >= 0)
            with annotate(EpExchangeAnnotation(kind="token_exchange")):
                routed = all_to_all(rows[order], taken, given, self.group)
        with annotate(EpRegionAnnotation(kind="compute")):
            computed = self.down(F.silu(self.up(routed)))
        with annotate(EpRegionAnnotation(kind="combine")):
            with annotate(EpExchangeAnnotation(kind="token_exchange")):
                returned = all_to_all(computed, given, taken, self.group)
            combined = torch.zeros_like(rows).index_copy(0, order, returned)
        return x + (combined * scores.unsqueeze(-1)).view_as(x)

    @staticmethod
    def draw(source: random.Random) -> dict[str, Any]:
        return {"hidden": source.choice(_HIDDEN), "count_rows": source.random() < 0.5}


class Observed(Part):
    """An operator of which nothing is known, forward and backward."""

    def build(self, dim: int) -> None:
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return observe(x * self.scale)


class Overwritten(Part):
    """Values that are written in place, by known operators and by an unknown one."""

    def build(self, dim: int) -> None:
        self.linear = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).clone()
        y[:, 0].mul_(0.5)
        with torch.no_grad():
            z = x.clone()
            scale_(z, 2.0)
            halves = z.chunk(2, dim=1)
            halves[0].add_(1)
        return x + y.add_(z)


class TensorProgram(Part):
    """Random instructions on tensors that share memory."""

    def build(self, dim: int, *, program: list[list[Any]], return_tensors: bool) -> None:
        self.program = [(str(op), int(first), int(second)) for op, first, second in program]
        self.register_buffer("buffer", torch.linspace(-1.0, 1.0, 2 * dim).view(2, dim))
        self.return_tensors = return_tensors

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            number, tensors = run_program(self.program, x, self.buffer, self.group)
        if self.return_tensors:
            self.returned.extend(tensors)
        return x + number.to(x.dtype)

    @staticmethod
    def draw(source: random.Random) -> dict[str, Any]:
        length = source.randint(3, 14)
        return {
            "program": [list(instruction) for instruction in draw_program(source, length)],
            "return_tensors": source.random() < 0.4,
        }


PART_KINDS: dict[str, type[Part]] = {
    "linear": Linear,
    "norm": Norm,
    "attention": Attention,
    "dropout": Dropout,
    "noise": Noise,
    "counter": Counter,
    "running_mean": RunningMean,
    "repeated": Repeated,
    "unused": Unused,
    "tensor_parallel": TensorParallel,
    "even_experts": EvenExperts,
    "routed_experts": RoutedExperts,
    "observed": Observed,
    "overwritten": Overwritten,
    "tensor_program": TensorProgram,
}


def draw_part(source: random.Random) -> PartSpec:
    """A random part."""
    kinds = list(PART_KINDS)
    # Half of what is drawn is what models are made of.
    kind = source.choice(kinds if source.random() < 0.5 else ["linear", "norm", "attention"])
    return PartSpec(kind=kind, options=PART_KINDS[kind].draw(source))


def build_part(spec: PartSpec, *, dim: int, group: str) -> Part:
    """The layer that ``spec`` describes."""
    return PART_KINDS[spec.kind](dim, group, **spec.options)
