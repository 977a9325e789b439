"""When each compute action ends if ranks wait for each other's products, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from gt_pipeline.schedules.actions import Action
from gt_pipeline.schedules.costs import CostModel
from gt_pipeline.schedules.dependencies import Product, consumed_by, produced_by


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTimes:
    """When actions end, up to where ranks get stuck, if they do."""

    ends: tuple[tuple[float, ...], ...]
    """For each rank, when its actions end, as many as can run."""

    depths: tuple[tuple[int, ...], ...]
    """For each rank, how many actions the longest chain has that must run up to each of its
    actions, that one included."""

    stuck: tuple[tuple[int, Action, Product], ...]
    """Each rank that cannot go on, the action that cannot run, and a product that it lacks."""


def compute_times(
    compute: Sequence[Sequence[Action]], *, num_stages: int, costs: CostModel
) -> ComputeTimes:
    """Run every rank's compute actions in order, as soon as what they take has been made."""
    made_at: dict[Product, tuple[float, int]] = {}
    ends: list[list[float]] = [[] for _ in compute]
    depths: list[list[int]] = [[] for _ in compute]
    lacking: dict[int, Product] = {}
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(compute):
            rank_ends, rank_depths = ends[rank], depths[rank]
            lacking.pop(rank, None)
            end, depth = (rank_ends[-1], rank_depths[-1]) if rank_ends else (0.0, 0)
            for action in islice(actions, len(rank_ends), None):
                parts = action.parts or (action,)
                for part in parts:
                    taken = consumed_by(part, num_stages)
                    if taken is None:
                        continue
                    if taken not in made_at:
                        lacking[rank] = taken
                        break
                    made_end, made_depth = made_at[taken]
                    end, depth = max(end, made_end), max(depth, made_depth)
                if rank in lacking:
                    break
                end, depth = end + costs(action), depth + 1
                rank_ends.append(end)
                rank_depths.append(depth)
                for part in parts:
                    if (product := produced_by(part, num_stages)) is not None:
                        made_at[product] = end, depth
                progress = True
    return ComputeTimes(
        ends=tuple(tuple(each) for each in ends),
        depths=tuple(tuple(each) for each in depths),
        stuck=tuple(
            (rank, compute[rank][len(ends[rank])], lacking[rank]) for rank in sorted(lacking)
        ),
    )
