"""Small graphs with FSDP collectives of several blocks, as simple FSDP annotates them."""

from __future__ import annotations

import torch
from pass_graphs import collectives
from torch.fx import GraphModule

from gt_config.node_keys import FsdpCollectiveAnnotation
from gt_passes.simulation import SymbolSizes
from gt_passes.simulation.work import work_of
from gt_trace.annotate import annotate
from gt_trace.node_metadata import read_annotation

GROUP = "fsdp"


def gathered(
    weight: torch.Tensor,
    name: str,
    *,
    num_ranks: int = 2,
    group: str = GROUP,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The whole of a parameter that is sharded along dim 0; cast before, if a dtype is given."""
    with annotate(
        FsdpCollectiveAnnotation(kind="unshard", parameter_names=(name,), mesh_axis=group)
    ):
        weight = weight if dtype is None else weight.to(dtype)
        return collectives.wait_tensor(collectives.all_gather_into_tensor(weight, num_ranks, group))


def reduce_scattered(
    gradient: torch.Tensor,
    name: str,
    *,
    num_ranks: int = 2,
    group: str = GROUP,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """This rank's shard of a gradient summed over ranks, halved; cast before, if a dtype is given."""
    with annotate(
        FsdpCollectiveAnnotation(kind="reduce_grad", parameter_names=(name,), mesh_axis=group)
    ):
        gradient = gradient if dtype is None else gradient.to(dtype)
        reduced = collectives.wait_tensor(
            collectives.reduce_scatter_tensor(gradient, "sum", num_ranks, group)
        )
        return reduced / 2


def all_reduced(gradient: torch.Tensor, name: str) -> torch.Tensor:
    """A gradient summed over ranks."""
    with annotate(
        FsdpCollectiveAnnotation(kind="reduce_grad", parameter_names=(name,), mesh_axis=GROUP)
    ):
        return collectives.wait_tensor(collectives.all_reduce(gradient, "sum", GROUP))


def copied_bytes(graph_module: GraphModule) -> int:
    """What FSDP's nodes read and write in device memory, collectives and divisions aside."""
    return sum(
        work.moved_bytes
        for node in graph_module.graph.nodes
        if read_annotation(node, FsdpCollectiveAnnotation) is not None
        and node.target is not torch.ops.aten.div.Tensor
        for work in [work_of(node, SymbolSizes())]
    )


@torch.library.custom_op("gt_tests::of_unknown_effect", mutates_args=())
def of_unknown_effect(x: torch.Tensor) -> torch.Tensor:
    """An operator of which nothing is known but its schema: a barrier."""
    return x.clone()


@of_unknown_effect.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)
