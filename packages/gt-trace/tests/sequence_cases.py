"""Sequences that ranks share, gathered. Worker processes import this module by name."""

from __future__ import annotations

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
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return torch.randn(like.shape, generator=generator)


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


class Exact:
    """A block in float64, by the definition; its gradients by hand."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self._scores(q, k, mask)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.where(lse.isneginf().unsqueeze(-1), 0.0, scores.softmax(dim=-1))
        return torch.einsum("bnqk,bknw->bqnw", weights, v), lse.transpose(1, 2).float()

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


def compare_ring() -> tuple[float, bool]:
    """The ring against attention to gathered keys, by norms; and whether it repeats its bits."""
    here = axis()
    size, rank = here.num_ranks, here.rank
    token = torch.arange(size * LENGTH)
    mine = token[rank * LENGTH : (rank + 1) * LENGTH]
    causal = mine.unsqueeze(1) >= token  # (l, L): other ranks' keys are nobody's, or everybody's
    owners = [(rank - step) % size for step in range(size)]
    masks = [causal[:, n * LENGTH : (n + 1) * LENGTH] for n in owners]

    def run(in_a_ring: bool) -> list[torch.Tensor]:
        keys, values = (each.detach().double().requires_grad_() for each in keys_and_values())
        queries = (keys.detach() * 1.5).requires_grad_()
        if in_a_ring:
            out = ring_attention(queries, keys, values, masks, Exact(), here)
        else:
            out, _ = Exact().attend(queries, *gather_sequence((keys, values), here), causal)
        gradients = torch.autograd.grad((out * weights(out)).sum(), (queries, keys, values))
        return [out.detach(), *gradients]

    ring, again, gathered = run(True), run(True), run(False)
    furthest = max(((a - b).norm() / b.norm()).item() for a, b in zip(ring, gathered, strict=True))
    return furthest, all(torch.equal(a, b) for a, b in zip(ring, again, strict=True))


def order_of_a_ring() -> list[str]:
    """Of a traced ring: sends, waits and what is attended to, in order; sends by their kind."""
    here = axis()
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> Any:
        out = ring_attention(q, k, v, [mask] * here.num_ranks, Exact(), here)
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
