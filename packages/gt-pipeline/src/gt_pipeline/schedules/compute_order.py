"""When each compute action ends if ranks wait for each other's products, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gt_pipeline.schedules.actions import Action
from gt_pipeline.schedules.costs import CostModel
from gt_pipeline.schedules.dependencies import Product, consumed_by, produced_by

__all__ = ["ComputeTimes", "compute_times"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTimes:
    """When actions end, up to where ranks get stuck, if they do."""

    ends: tuple[tuple[float, ...], ...]
    """By rank, of as many actions as can run."""

    stuck: tuple[tuple[int, Action, Product], ...]
    """Each rank that cannot go on, the action that cannot run, and a product that it lacks."""


def compute_times(
    compute: Sequence[Sequence[Action]], *, num_stages: int, costs: CostModel
) -> ComputeTimes:
    """Run every rank's compute actions in order, as soon as what they take has been made.

    Args:
        compute: by rank.
        num_stages: of all ranks.
        costs: of compute actions.
    """
    made_at: dict[Product, float] = {}
    ends: list[list[float]] = [[] for _ in compute]
    lacking: dict[int, Product] = {}
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(compute):
            lacking.pop(rank, None)
            while len(ends[rank]) < len(actions):
                action = actions[len(ends[rank])]
                start = ends[rank][-1] if ends[rank] else 0.0
                for part in action.compute_parts:
                    taken = consumed_by(part, num_stages)
                    if taken is None:
                        continue
                    if taken not in made_at:
                        lacking[rank] = taken
                        break
                    start = max(start, made_at[taken])
                if rank in lacking:
                    break
                end = start + costs(action)
                ends[rank].append(end)
                for part in action.compute_parts:
                    if (product := produced_by(part, num_stages)) is not None:
                        made_at[product] = end
                progress = True
    return ComputeTimes(
        ends=tuple(tuple(each) for each in ends),
        stuck=tuple(
            (rank, compute[rank][len(ends[rank])], lacking[rank]) for rank in sorted(lacking)
        ),
    )
