"""Sequences that ranks share, gathered. Worker processes import this module by name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import (
    flex_cp_allgather,
)

from gt_config.node_keys import CpCollectiveAnnotation
from gt_trace import phase_of, read_annotation, trace_step
from gt_trace.context_parallel import SequenceAxis, gather_sequence, ring_attention

BATCH, LENGTH = 2, 3  # of a rank


def axis() -> SequenceAxis:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    return SequenceAxis.of(mesh)


def keys_and_values() -> tuple[torch.Tensor, torch.Tensor]:
    """Of this rank; values are narrower, as in multi-head latent attention."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (BATCH, LENGTH, 2)
    keys = torch.randn(*shape, 5, generator=generator, requires_grad=True)
    values = torch.randn(*shape, 4, generator=generator, requires_grad=True)
    return keys, values


def weights(like: torch.Tensor) -> torch.Tensor:
    """What a rank's loss makes of each element: another on every rank."""
    places = torch.arange(like.numel(), dtype=like.dtype).view(like.shape)
    return torch.cos((100 + dist.get_rank()) * (places + 1))


def loss_of(gathered: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.stack([(part * weights(part)).sum() for part in gathered]).sum()


def compare_with_torch() -> list[bool]:
    """Whether what is gathered, and its gradients, have the bits of PyTorch's operator."""
    here = axis()
    found = []
    ours, theirs = keys_and_values(), keys_and_values()
    gathered = gather_sequence(ours, here)
    expected = flex_cp_allgather(*theirs, 1, here.group_name)
    found += [torch.equal(a, b) for a, b in zip(gathered, expected, strict=True)]
    loss_of(gathered).backward()
    loss_of(expected).backward()
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        found.append(torch.equal(a.grad, b.grad))
    return found


def what_a_trace_holds() -> list[tuple[str, str | None, str, str]]:
    """Of each collective and wait: operator, phase, and what its annotation says."""
    here = axis()

    def step(keys: torch.Tensor, values: torch.Tensor) -> Any:
        return torch.autograd.grad(loss_of(gather_sequence((keys, values), here)), [keys, values])

    traced = trace_step(step)(*keys_and_values())
    found = []
    for node in traced.graph_module.graph.nodes:
        name = str(node.target)
        if not name.startswith("_c10d_functional"):
            continue
        annotation = read_annotation(node, CpCollectiveAnnotation)
        assert annotation is not None, name
        operator = name.split(".")[1]
        found.append((operator, phase_of(node), annotation.kind, annotation.mesh_axis))
    return found


def refused_mesh() -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("cp", "tp"))
    try:
        SequenceAxis.of(mesh)
    except ValueError as error:
        return str(error)
    return "no error"


class BlockByDefinition:
    """A block in the dtype of its operands; its gradients by hand."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self._scores(q, k, mask)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.where(lse.isneginf().unsqueeze(-1), 0.0, scores.softmax(dim=-1))
        return torch.einsum("bnqk,bknw->bqnw", weights, v), lse.transpose(1, 2)

    def gradients(
        self,
        gradient: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights = (self._scores(q, k, mask) - lse.transpose(1, 2).unsqueeze(-1)).exp()
        of_weights = torch.einsum("bqnw,bknw->bnqk", gradient, v)
        mean = (gradient * out).sum(dim=-1).transpose(1, 2).unsqueeze(-1)
        of_scores = weights * (of_weights - mean)
        return (
            torch.einsum("bnqk,bknh->bqnh", of_scores, k),
            torch.einsum("bnqk,bqnh->bknh", of_scores, q),
            torch.einsum("bnqk,bqnw->bknw", weights, gradient),
        )

    def _scores(self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bqnh,bknh->bnqk", q, k).masked_fill(~mask, float("-inf"))


class _FromLogarithms(torch.autograd.Function):
    """One block, whose backward makes weights of the logarithm of their sum, as kernels do."""

    @staticmethod
    def forward(ctx: Any, *operands: torch.Tensor) -> torch.Tensor:
        out, lse = BlockByDefinition().attend(*operands)
        ctx.save_for_backward(*operands, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        q, k, v, mask, out, lse = ctx.saved_tensors
        return *BlockByDefinition().gradients(gradient, q, k, v, out, lse, mask), None


def attention_to_gathered(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, ranks: SequenceAxis
) -> torch.Tensor:
    """Of this rank's queries to the keys of all ranks, in one block."""
    attended: torch.Tensor = _FromLogarithms.apply(q, *gather_sequence((k, v), ranks), mask)
    return attended


@dataclass(frozen=True, slots=True, kw_only=True)
class RingErrors:
    """By norms, of the output and three gradients; each relative, the largest."""

    in_float64: float
    """The ring to gathered keys that PyTorch differentiates, both in float64."""

    ring: float
    """The ring in float32 to the same."""

    gathered: float
    """Gathered keys in float32, their backward as kernels have it, to the same."""

    apart: float
    """The ring to those, both in float32."""

    is_repeatable: bool
    """Whether a second ring has the bits of the first, in both dtypes."""


def compare_ring() -> RingErrors:
    """The ring beside attention to gathered keys, and both beside the same in float64."""
    here = axis()
    size, rank = here.num_ranks, here.rank
    token = torch.arange(size * LENGTH)
    mine = token[rank * LENGTH : (rank + 1) * LENGTH]
    causal = mine.unsqueeze(1) >= token  # (l, L): other ranks' keys are nobody's, or everybody's
    owners = [(rank - step) % size for step in range(size)]
    masks = [causal[:, n * LENGTH : (n + 1) * LENGTH] for n in owners]

    def run(way: str, dtype: torch.dtype) -> list[torch.Tensor]:
        keys, values = (each.detach().to(dtype).requires_grad_() for each in keys_and_values())
        # Scaled as attention scales: a sharper softmax passes on more of every rounding.
        queries = (keys.detach() * 1.5 / math.sqrt(keys.shape[-1])).requires_grad_()
        block = BlockByDefinition()
        if way == "ring":
            out = ring_attention(queries, keys, values, masks, block, here)
        elif way == "gathered":
            out = attention_to_gathered(queries, keys, values, causal, here)
        else:
            out, _ = block.attend(queries, *gather_sequence((keys, values), here), causal)
        gradients = torch.autograd.grad((out * weights(out)).sum(), (queries, keys, values))
        return [out.detach().double(), *(each.double() for each in gradients)]

    def furthest(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
        pairs = zip(found, expected, strict=True)
        return max(((a - b).norm() / b.norm()).item() for a, b in pairs)

    exact = run("differentiated by PyTorch", torch.float64)
    rings = {dtype: run("ring", dtype) for dtype in (torch.float32, torch.float64)}
    gathered = run("gathered", torch.float32)
    return RingErrors(
        in_float64=furthest(rings[torch.float64], exact),
        ring=furthest(rings[torch.float32], exact),
        gathered=furthest(gathered, exact),
        apart=furthest(rings[torch.float32], gathered),
        is_repeatable=all(
            torch.equal(a, b)
            for dtype, found in rings.items()
            for a, b in zip(run("ring", dtype), found, strict=True)
        ),
    )


def order_of_a_ring() -> list[str]:
    """Of a traced ring: sends, waits and what is attended to, in order; sends by their kind."""
    here = axis()
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> Any:
        out = ring_attention(q, k, v, [mask] * here.num_ranks, BlockByDefinition(), here)
        return torch.autograd.grad(out.sum(), [q, k, v])

    keys, values = keys_and_values()
    traced = trace_step(step)(keys.detach().clone().requires_grad_(), keys, values, mask)
    found = []
    for node in traced.graph_module.graph.nodes:
        annotation = read_annotation(node, CpCollectiveAnnotation)
        name = str(node.target)
        if annotation is not None and "all_to_all" in name:
            found.append(f"{phase_of(node)}: {annotation.kind}")
        elif annotation is not None and "wait_tensor" in name:
            found.append(f"{phase_of(node)}: wait for {annotation.kind}")
        elif "masked_fill" in name:
            found.append(f"{phase_of(node)}: attend")
    return found
