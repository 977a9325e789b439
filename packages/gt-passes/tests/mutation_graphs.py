"""Captured training steps into which ``mutation_kinds`` seeds bugs: what real steps are made of.

Each stands for a family: FSDP with mixed precision; HSDP with tensor parallelism; microbatches with
buffers, dropout and an unknown operator; expert parallelism with sizes that data decide; attention
whose mask is a graph inside the graph, with constants and overlapping windows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from pass_graphs import capture
from torch import nn
from torch._higher_order_ops.flex_attention import flex_attention
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.fx import GraphModule
from torch.nn import functional as F

from gt_passes import GraphPass, PassContext, PassManager, RemoveDeadCode
from gt_passes.verifier.collective_order import CollectiveSequence
from gt_trace.capture.trace import trace_step
from gt_trace.capture.traced_step import TracedStep
from gt_trace.fsdp import MixedPrecision, shard
from gt_trace.stamping import trace_step_by_stamping
from gt_trace.testing import fake_world

DIM = 16
VOCAB = 32
NUM_STAMPED_LAYERS = 8
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGraph:
    """A captured step, before or after some passes."""

    name: str
    graph_module: GraphModule
    context: PassContext

    peer_sequence: CollectiveSequence
    """The collectives of another rank, with the same passes, and verified like this one's."""


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    """Four projections of equal shape, two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            weight(x).unflatten(-1, (-1, DIM // 2)).transpose(1, 2)
            for weight in (self.wq, self.wk, self.wv)
        )
        scores = (q @ k.transpose(-2, -1) / 2.5).softmax(-1)
        return self.wo((scores @ v).transpose(1, 2).flatten(2))


class GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(DIM, 2 * DIM, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


@torch.library.custom_op("gt_test_mutations::probe", mutates_args=())
def probe(x: torch.Tensor) -> torch.Tensor:
    """An operator of which nothing is known: a barrier."""
    return x.clone()


@probe.register_fake
def _probe(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class NoisyMlp(nn.Module):
    """Dropout, statistics in buffers that are updated in place, and an unknown operator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = GatedMlp()
        self.register_buffer("mean", torch.zeros(DIM))
        self.register_buffer("peak", torch.zeros(DIM))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        running = self.mean.view(DIM)  # sees the writes below
        with torch.no_grad():
            self.steps += 1
            self.peak.copy_(torch.maximum(self.peak, x.abs().amax((0, 1))))
            self.mean.mul_(0.9).add_(probe(x.mean((0, 1))), alpha=0.1)
        centered = x - running
        return F.dropout(self.inner(centered), 0.1) + torch.rand_like(x) * 0.01


class Experts(nn.Module):
    """One expert a rank: counts are exchanged, then tokens, and back."""

    def __init__(self, group_name: str, num_ranks: int) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, num_ranks, bias=False)
        self.expert = GatedMlp()
        self._group_name = group_name
        self._num_ranks = num_ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        sent = (chosen[:, None] == torch.arange(self._num_ranks)).sum(0)
        functional = torch.ops._c10d_functional
        received = functional.wait_tensor(
            functional.all_to_all_single(
                sent, [1] * self._num_ranks, [1] * self._num_ranks, self._group_name
            )
        )
        # What comes in is decided by data; what goes out is not, so that it can come back.
        inputs = [tokens.shape[0] // self._num_ranks] * self._num_ranks
        outputs = received.tolist()
        for size in outputs:
            torch._check(size >= 0)
        there = all_to_all_single_autograd(tokens[order], outputs, inputs, self._group_name)
        back = all_to_all_single_autograd(self.expert(there), inputs, outputs, self._group_name)
        combined = torch.zeros_like(tokens).index_add(0, order, back)
        return (combined * weights[:, None]).view_as(x)


class Block(nn.Module):
    def __init__(self, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = Norm(), Norm()
        self.attention = Attention()
        self.feed_forward = feed_forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    def __init__(self, feed_forwards: Sequence[nn.Module]) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Block(feed_forward) for feed_forward in feed_forwards])
        self.norm = Norm()
        self.output = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def capture_step(name: str, *, rank: int = 0) -> StepGraph:
    """Capture the step of that name on a rank of its fake world, without dead code."""
    make, world_size = _STEPS[name]
    return _captured(name, make, world_size, rank, trace_step)


def capture_stamped_step(name: str) -> StepGraph:
    """Capture a step of eight equal layers, most of which are copies of two traced ones."""
    make, world_size = _STAMPED_STEPS[name]

    def trace(step: Callable[..., Any], *, module: nn.Module) -> Callable[..., TracedStep]:
        capture = trace_step_by_stamping(step, module=module)

        def stamped(*args: Any) -> TracedStep:
            captured = capture(*args)
            traced, report = captured.step, captured.report
            assert report.stamped, report
            assert report.num_layers_traced < report.num_layers == NUM_STAMPED_LAYERS
            return traced

        return stamped

    return _captured(name, make, world_size, 0, trace)


def _captured(
    name: str,
    make: Callable[[], tuple[nn.Module, int]],
    world_size: int,
    rank: int,
    trace: Callable[..., Callable[..., TracedStep]],
) -> StepGraph:
    torch.manual_seed(0)
    with fake_world(rank=rank, world_size=world_size):
        model, num_microbatches = make()

        def step(tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
            parameters = tuple(model.parameters())
            loss = torch.zeros(())
            for part in tokens.chunk(num_microbatches):
                logits = model(part)[:, :-1].flatten(0, 1).float()
                loss = loss + F.cross_entropy(logits, part[:, 1:].flatten())
            return loss, *torch.autograd.grad(loss, parameters)

        tokens = torch.arange(4 * 9).view(4, 9) * (rank + 3) % VOCAB
        traced = trace(step, module=model)(tokens)
    names = tuple(entry.name for entry in traced.inputs[: traced.num_static_inputs])
    context = PassContext(fake_mode=traced.fake_mode, static_input_names=names)
    apply_passes(traced.graph_module, context, (RemoveDeadCode(),))
    return step_graph(name, traced.graph_module, context)


def capture_attention() -> StepGraph:
    """FlexAttention, whose mask is a graph that the step holds, as it holds tensor literals."""

    def step(x: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = torch.tensor([0.5, 1.5])
        mask = (128, 128, *[blocks, blocks[..., None]] * 4, 128, 128, _is_causal)
        out, _, _ = flex_attention(x, x, x, _score, mask, 0.25, {})
        heads = out * scale[:, None, None] + torch.tensor([0.25, 0.75])[:, None, None]
        windows = heads.contiguous().as_strided((127, 2 * DIM), (DIM, 1))
        return heads.exp(), windows.square().sum()

    graph_module = capture(step, torch.ones(1, 2, 128, DIM), torch.ones(1, 1, 1, dtype=torch.int32))
    return step_graph("attention", graph_module, PassContext.from_graph(graph_module))


def step_graph(name: str, graph_module: GraphModule, context: PassContext) -> StepGraph:
    """A step, with what another rank would launch."""
    peer = copy.deepcopy(graph_module)
    PassManager([RemoveDeadCode()], context=context).run(peer)
    return StepGraph(
        name=name,
        graph_module=graph_module,
        context=context,
        peer_sequence=CollectiveSequence.of(peer),
    )


def _score(score, batch, head, query, key):
    return score + 0.5


def _is_causal(batch, head, query, key):
    return query >= key


def apply_passes(
    graph_module: GraphModule, context: PassContext, passes: Sequence[GraphPass]
) -> None:
    """Run passes without a pass manager, and so without verification."""
    for graph_pass in passes:
        graph_pass.run(graph_module, context)
    graph_module.recompile()


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _fsdp() -> tuple[nn.Module, int]:
    model = Decoder([GatedMlp(), GatedMlp()])
    shard(model, _mesh((4,), ("dp",)), mode="shard", mixed_precision=BF16)
    return model, 1


def _hsdp_tensor_parallel() -> tuple[nn.Module, int]:
    model = Decoder([GatedMlp()])
    mesh = _mesh((2, 2, 2), ("replicate", "shard", "tp"))
    for layer in model.layers:
        plan = {
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(),
        }
        parallelize_module(layer, mesh["tp"], plan)
    shard(model, mesh["replicate", "shard"], mode="hybrid_shard", mixed_precision=BF16)
    return model, 1


def _noisy_microbatches() -> tuple[nn.Module, int]:
    model = Decoder([NoisyMlp()])
    shard(model, _mesh((2,), ("dp",)), mode="shard")
    return model, 2


def _expert_parallel() -> tuple[nn.Module, int]:
    mesh = _mesh((4,), ("dp",))
    model = Decoder([Experts(mesh.get_group().group_name, dist.get_world_size())])
    shard(model, mesh, mode="shard", mixed_precision=BF16)
    return model, 1


_STEPS: dict[str, tuple[Callable[[], tuple[nn.Module, int]], int]] = {
    "fsdp": (_fsdp, 4),
    "hsdp-tensor-parallel": (_hsdp_tensor_parallel, 8),
    "noisy-microbatches": (_noisy_microbatches, 2),
    "expert-parallel": (_expert_parallel, 4),
}

STEP_NAMES = tuple(_STEPS)


def _stamped_fsdp() -> tuple[nn.Module, int]:
    model = Decoder([GatedMlp() for _ in range(NUM_STAMPED_LAYERS)])
    shard(model, _mesh((4,), ("dp",)), mode="shard", mixed_precision=BF16)
    return model, 1


def _stamped_noise() -> tuple[nn.Module, int]:
    model = Decoder([NoisyMlp() for _ in range(NUM_STAMPED_LAYERS)])
    shard(model, _mesh((2,), ("dp",)), mode="shard")
    return model, 1


_STAMPED_STEPS = {"stamped fsdp": (_stamped_fsdp, 4), "stamped noise": (_stamped_noise, 2)}

STAMPED_STEP_NAMES = tuple(_STAMPED_STEPS)
