"""Pairs of programs, what the dataflow check says of them, and collectives by themselves or in buckets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from pass_graphs import capture, collectives

from gt_passes.graph_problem import GraphProblem
from gt_passes.verifier.dataflow.check_dataflow import Dataflow
from gt_passes.verifier.dataflow.value_table import ValueTable

aten = torch.ops.aten
RANKS = 4
X = torch.ones(8, 4)
Y = torch.ones(8, 4)
V = torch.ones(1)


def differences(
    before: Callable[..., object],
    after: Callable[..., object],
    *args: torch.Tensor,
    same_groups: Mapping[str, str] | None = None,
) -> list[GraphProblem]:
    """What the dataflow check says of two functions with the same names of arguments."""
    table = ValueTable()
    first, second = (
        Dataflow.of(capture(program, *args), table=table, same_groups=same_groups or {})
        for program in (before, after)
    )
    return list(first.find_differences(second))


def same(before, after, *args, **options) -> bool:
    return not differences(before, after, *args, **options)


def gather(x, group="fsdp"):
    return collectives.wait_tensor(collectives.all_gather_into_tensor(x, RANKS, group))


def scatter(x, group="fsdp", reduction="sum"):
    return collectives.wait_tensor(collectives.reduce_scatter_tensor(x, reduction, RANKS, group))


def reduce(x, group="dp", reduction="sum"):
    return collectives.wait_tensor(collectives.all_reduce(x, reduction, group))


def bucketed_gather(tensors, group="fsdp"):
    bucket = torch.cat([x.reshape(-1) for x in tensors])
    rows = gather(bucket, group).view(RANKS, -1)
    parts = rows.split([x.numel() for x in tensors], dim=1)
    return [
        part.reshape(RANKS * x.shape[0], *x.shape[1:])
        for part, x in zip(parts, tensors, strict=True)
    ]


def bucketed_scatter(tensors, group="fsdp", reduction="sum"):
    bucket = torch.cat([x.reshape(RANKS, -1) for x in tensors], dim=1)
    reduced = scatter(bucket.reshape(-1), group, reduction)
    parts = reduced.split([x.numel() // RANKS for x in tensors])
    return [
        part.view(x.shape[0] // RANKS, *x.shape[1:]) for part, x in zip(parts, tensors, strict=True)
    ]
