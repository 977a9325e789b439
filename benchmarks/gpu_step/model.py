"""A decoder of Llama 3's shape, in plain torch, on one rank of a world that does not exist."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from gt_trace.fsdp import MixedPrecision, shard
from gt_trace.testing import fake_world

Outputs = tuple[torch.Tensor, tuple[torch.Tensor, ...]]
StepFn = Callable[[torch.Tensor, torch.Tensor], Outputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model and of the batch of one rank."""

    dim: int
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab: int
    seq: int
    batch: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    shape: Shape
    fsdp: int
    tp: int


LLAMA_8B = Workload(
    name="8B, FSDP 4 x TP 2, rank 0 of 8 (collectives do nothing)",
    shape=Shape(
        dim=4096,
        hidden=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        vocab=128256,
        seq=8192,
    ),
    fsdp=4,
    tp=2,
)
LLAMA_8B_FSDP = Workload(
    name="8 layers of 8B, FSDP 8, rank 0 of 8 (collectives do nothing)",
    shape=dataclasses.replace(LLAMA_8B.shape, num_layers=8),
    fsdp=8,
    tp=1,
)
LLAMA_1B = Workload(
    name="1B, one rank",
    shape=Shape(
        dim=2048,
        hidden=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        vocab=128256,
        seq=8192,
    ),
    fsdp=1,
    tp=1,
)


class Attention(nn.Module):
    """Causal, by PyTorch's scaled dot product; rotary embedding of the two halves of a head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.dim // shape.num_heads
        kv_dim = shape.num_kv_heads * self.head_dim
        self.wq = nn.Linear(shape.dim, shape.dim, bias=False)
        self.wk, self.wv = (nn.Linear(shape.dim, kv_dim, bias=False) for _ in range(2))
        self.wo = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.wq, self.wk, self.wv)
        )
        q, k = _rotated(q, angles), _rotated(k, angles)
        groups = q.shape[1] // k.shape[1]
        k, v = (each.repeat_interleave(groups, dim=1) for each in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(attended.transpose(1, 2).flatten(2))


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.type_as(x)


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(shape.dim, shape.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(shape.dim, eps=1e-5) for _ in range(2))
        self.attention, self.feed_forward = Attention(shape), FeedForward(shape)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    angles: torch.Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(shape.vocab, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.output = nn.Linear(shape.dim, shape.vocab, bias=False)
        head_dim = shape.dim // shape.num_heads
        rates = 500000.0 ** -(torch.arange(0, head_dim, 2).float() / head_dim)
        angles = torch.arange(shape.seq).float()[:, None] * rates
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        return self.output(self.norm(x))


_TP_PLAN = {
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(),
    "feed_forward.w1": ColwiseParallel(),
    "feed_forward.w3": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(),
}


@contextmanager
def placed_model(
    workload: Workload, device: torch.device, *, float8: str | None = None
) -> Iterator[Decoder]:
    """The model in float32, computing in bfloat16, with what rank 0 has of it.

    The ranks beside it do not exist: collectives return at once, and what they would have brought
    is whatever the memory held.

    Args:
        workload: sizes and degrees.
        device: where it computes.
        float8: a recipe of torchao's for the linear layers of the blocks; None for bfloat16.

    Raises:
        ImportError: float8 is asked for, and torchao is not here.
    """
    with fake_world(rank=0, world_size=workload.fsdp * workload.tp):
        with device:
            model = Decoder(workload.shape)
        if float8 is not None:
            _in_float8(model, float8, device)
        mesh = init_device_mesh(
            device.type, (workload.fsdp, workload.tp), mesh_dim_names=("fsdp", "tp")
        )
        if workload.tp > 1:
            for layer in model.layers:
                parallelize_module(layer, mesh["tp"], _TP_PLAN)
            head = ColwiseParallel(output_layouts=Replicate())
            parallelize_module(model, mesh["tp"], {"output": head})
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(model, mesh["fsdp"], mode="shard", mixed_precision=precision)
        generator = torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                if "norm" in name:
                    local.fill_(1.0)
                else:
                    local.normal_(std=0.02, generator=generator)
        yield model


def _in_float8(model: Decoder, recipe: str, device: torch.device) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    if device.type == "cpu":
        config = dataclasses.replace(config, emulate=True)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, fqn: fqn.startswith("layers")
    )


def batch(workload: Workload, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, (B, L) each."""
    shape = workload.shape
    generator = torch.Generator(device).manual_seed(1)
    tokens, labels = torch.randint(
        shape.vocab, (2, shape.batch, shape.seq), device=device, generator=generator
    )
    return tokens, labels


def eager_step(model: nn.Module) -> StepFn:
    """Forward, loss and gradients."""

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> Outputs:
        logits = model(tokens).flatten(0, 1).float()
        loss = F.cross_entropy(logits, labels.flatten())
        return loss, torch.autograd.grad(loss, tuple(model.parameters()))

    return step
