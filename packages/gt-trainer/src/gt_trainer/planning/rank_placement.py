"""Where the groups of each mesh axis lie on a cluster: which talk over NVLink, which over NICs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from gt_trainer.planning.run_recipe import RunRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPlacement:
    """The groups of one mesh axis. Ranks are numbered host by host."""

    axis: str
    size: int
    stride: int
    """From one rank of a group to the next."""

    num_domains: int
    """NVLink domains over which a group is spread."""

    most_in_a_domain: int

    def __str__(self) -> str:
        """In words."""
        ranks = "neighbors" if self.stride == 1 else f"each {self.stride} ranks apart"
        if self.num_domains == 1:
            return f"{self.axis} {self.size}: {ranks}, all over NVLink"
        most = self.most_in_a_domain
        share = "one" if most == 1 else f"up to {most}"
        over = "over NICs" if most == 1 else "over NVLink and NICs"
        return (
            f"{self.axis} {self.size}: {ranks}, {share} in each of {self.num_domains:,} NVLink "
            f"domains, {over}"
        )


def rank_placement(recipe: RunRecipe, *, gpus_per_domain: int) -> list[AxisPlacement]:
    """Of each axis with more than one rank, the innermost first.

    Args:
        recipe: ranks are numbered as torchtitan's mesh has them: a tensor-parallel group's are
            neighbors, then come context parallelism, shards, replicas, and pipeline stages
            outermost. Experts are sharded over neighbors, whichever of those they are.
        gpus_per_domain: GPUs that NVLink connects.
    """
    return [
        AxisPlacement(
            axis=axis,
            size=size,
            stride=stride,
            num_domains=len(domains),
            most_in_a_domain=max(domains.values()),
        )
        for axis, size, stride in _axes(recipe)
        if size > 1
        for domains in [Counter(rank * stride // gpus_per_domain for rank in range(size))]
    ]


def _axes(recipe: RunRecipe) -> Iterator[tuple[str, int, int]]:
    """Name, size and stride."""
    yield "ep", recipe.ep, 1
    stride = 1
    for axis in ("tp", "cp", "dp_shard", "dp_replicate", "pp"):
        size = recipe.degrees[axis]
        yield axis, size, stride
        stride *= size
