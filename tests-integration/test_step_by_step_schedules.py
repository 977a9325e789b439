"""Two simulations of one schedule, made by different methods, agree."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gt_pipeline.schedules import SCHEDULE_NAMES, ActionCosts, lower, schedule_of, simulate
from gt_pipeline.schedules.actions import Action

ROOT = Path(__file__).resolve().parent.parent

with pytest.MonkeyPatch.context() as paths:
    paths.syspath_prepend(ROOT / "benchmarks")
    from pipeline_simulation.step_by_step import simulate_step_by_step


def of_stages(seed: int):
    """Costs that differ by stage, as those of real ones do."""
    kinds = ActionCosts(transfer=0.3, unshard=1.5, reduce_grad=2.5, overlap_f_b=2.2)
    factors = [random.Random(seed + stage).uniform(0.5, 2.0) for stage in range(64)]

    def cost(action: Action) -> float:
        return kinds(action) * factors[action.stage]

    return cost


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize("overlap_gathers", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_idle_times_are_the_same(name: str, overlap_gathers: bool, seed: int) -> None:
    schedule = schedule_of(
        name,
        num_ranks=4,
        num_stages=4 if name in ("1F1B", "GPipe") else 8,
        num_microbatches=12,
    )
    lowered = lower(schedule, unshards=True, reduces=True, max_unsharded_stages=2)
    ours = simulate(lowered, of_stages(seed), overlap_gathers=overlap_gathers)
    theirs = simulate_step_by_step(lowered, of_stages(seed), overlap_gathers=overlap_gathers)
    assert ours.makespan == pytest.approx(theirs.makespan)
    assert ours.idle == pytest.approx(theirs.idle)
