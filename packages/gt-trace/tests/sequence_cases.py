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
from gt_trace.context_parallel import SequenceAxis, gather_sequence

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
