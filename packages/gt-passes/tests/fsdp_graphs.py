"""Small graphs with FSDP collectives of several blocks, as simple FSDP annotates them."""

from __future__ import annotations

import torch
from pass_graphs import collectives

from gt_config.node_keys import FsdpCollectiveAnnotation
from gt_trace.annotate import annotate

GROUP = "fsdp"


def gathered(
    weight: torch.Tensor, name: str, *, num_ranks: int = 2, group: str = GROUP
) -> torch.Tensor:
    """The whole of a parameter that is sharded along dim 0."""
    with annotate(
        FsdpCollectiveAnnotation(kind="unshard", parameter_names=(name,), mesh_axis=group)
    ):
        return collectives.wait_tensor(collectives.all_gather_into_tensor(weight, num_ranks, group))


def reduce_scattered(
    gradient: torch.Tensor, name: str, *, num_ranks: int = 2, group: str = GROUP
) -> torch.Tensor:
    """This rank's shard of a gradient summed over ranks, halved."""
    with annotate(
        FsdpCollectiveAnnotation(kind="reduce_grad", parameter_names=(name,), mesh_axis=group)
    ):
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


@torch.library.custom_op("gt_tests::of_unknown_effect", mutates_args=())
def of_unknown_effect(x: torch.Tensor) -> torch.Tensor:
    """An operator of which nothing is known but its schema: a barrier."""
    return x.clone()


@of_unknown_effect.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)
