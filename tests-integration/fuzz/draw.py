"""Random steps."""

from __future__ import annotations

import random

from fuzz.case import StepSpec
from fuzz.parts import draw_part

__all__ = ["draw_step"]


def draw_step(source: random.Random, *, four_ranks: bool) -> StepSpec:
    """A random step for 2 or 4 ranks: up to three blocks of up to three layers."""
    if four_ranks:
        sharding = source.choice(["hybrid_shard", "shard_beside_tensor"])
    else:
        sharding = source.choice(["shard"] * 6 + ["replicate", "none"])
    num_microbatches = source.choice([1, 1, 1, 2])
    blocks = tuple(
        tuple(draw_part(source) for _ in range(source.randint(1, 3)))
        for _ in range(source.randint(1, 3))
    )
    return StepSpec(
        seed=source.randrange(10_000),
        sharding=sharding,  # type: ignore[arg-type]  # one of its values, drawn from a list
        param_dtype=source.choice([None, None, "bfloat16"]),
        reduction=source.choice(["avg", "avg", "sum"]),
        dim=source.choice([2, 3, 4, 4, 5, 6]),
        vocabulary=source.choice([5, 7, 8]),
        tied=source.random() < 0.3,
        num_microbatches=num_microbatches,
        share_gathered=num_microbatches > 1 and source.random() < 0.3,
        optimizer=source.random() < 0.15,
        log_metric=source.random() < 0.3,
        blocks=blocks,
    )
