"""Where the groups of each mesh axis lie on a cluster: which talk over NVLink, which over NICs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from gt_trainer.planning.run_recipe import RunRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPlacement:
    """The groups of one mesh axis, or of two. Ranks are numbered host by host."""

    axis: str
    size: int
    stride: int
    """From one rank of a group to the next."""

    num_domains: int
    """NVLink domains over which a group is spread, the widest one if they differ."""

    most_in_a_domain: int
    """Of that group's ranks."""

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
    """Of each group of ranks that exchange something, with more than one rank, the innermost first.

    Args:
        recipe: ranks are numbered as torchtitan's mesh has them: a tensor-parallel group's are
            neighbors, then come context parallelism, shards, replicas, and pipeline stages
            outermost. Parameters are sharded over ranks of context parallelism too (``fsdp``);
            experts over neighbors, whichever of those they are, and each expert over ``efsdp``.
        gpus_per_domain: GPUs that NVLink connects.
    """
    found = []
    for axis, size, stride in _axes(recipe):
        if size < 2:
            continue
        firsts = (rank for rank in range(recipe.num_gpus) if rank // stride % size == 0)
        groups = (ranks_by_domain(size, stride, gpus_per_domain, first=first) for first in firsts)
        widest = max(groups, key=len)
        found.append(
            AxisPlacement(
                axis=axis,
                size=size,
                stride=stride,
                num_domains=len(widest),
                most_in_a_domain=max(widest.values()),
            )
        )
    return found


def ranks_by_domain(
    size: int, stride: int, gpus_per_domain: int, *, first: int = 0
) -> Counter[int]:
    """How many ranks of a group lie in each NVLink domain, by the domain's number.

    Args:
        size: of the group.
        stride: from one of its ranks to the next.
        gpus_per_domain: GPUs that NVLink connects.
        first: its first rank.
    """
    return Counter((first + step * stride) // gpus_per_domain for step in range(size))


def _axes(recipe: RunRecipe) -> Iterator[tuple[str, int, int]]:
    """Name, size and stride."""
    shards = recipe.dp_shard * recipe.cp
    if recipe.ep > 1:
        yield "ep", recipe.ep, 1
        yield "efsdp", shards * recipe.tp // recipe.ep, recipe.ep
    yield "tp", recipe.tp, 1
    yield "cp", recipe.cp, recipe.tp
    yield "fsdp", shards, recipe.tp
    yield "dp_replicate", recipe.dp_replicate, shards * recipe.tp
    yield "pp", recipe.pp, shards * recipe.tp * recipe.dp_replicate
