"""Plans have a budget in every run: what the user says, or nine tenths of the memory there is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gt_config import AutoParallelConfig
from gt_passes.simulation import h100_sxm
from gt_trainer.placement.memory_budget import memory_budget
from gt_trainer.placement.planned_machine import PlannedMachine, planned_for

GIB = 2**30


def test_what_the_user_says_counts() -> None:
    budget = memory_budget(AutoParallelConfig(memory_budget_gib=1.5))
    assert budget.num_bytes == 3 * GIB // 2
    assert str(budget) == (
        "a budget of 1.50 GiB on each rank: --compile.autoparallel_solver.memory_budget_gib"
    )


def test_a_dry_run_plans_for_the_memory_of_an_h100() -> None:
    with planned_for(PlannedMachine(is_simulated=True)):
        budget = memory_budget(AutoParallelConfig())
    capacity = h100_sxm().hbm_capacity_bytes
    assert budget.num_bytes == pytest.approx(0.9 * capacity, abs=1)
    assert str(budget) == (
        f"a budget of {0.9 * capacity / GIB:.2f} GiB on each rank: nine tenths of the "
        f"{capacity / GIB:.2f} GiB of {h100_sxm().name}"
    )


def test_a_dry_run_plans_for_the_memory_of_the_machine_that_it_is_told_of() -> None:
    machine = replace(h100_sxm(), name="two GiB", hbm_capacity_bytes=2 * GIB)
    with planned_for(PlannedMachine(hardware=machine, is_simulated=True)):
        budget = memory_budget(AutoParallelConfig())
    assert str(budget) == (
        "a budget of 1.80 GiB on each rank: nine tenths of the 2.00 GiB of two GiB"
    )


def test_a_run_has_the_memory_of_its_own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(h100_sxm(), hbm_capacity_bytes=2 * GIB)
    with planned_for(PlannedMachine(hardware=machine)):
        assert "of this machine's" in memory_budget(AutoParallelConfig()).source


def test_ranks_on_a_cpu_share_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gt_trainer.placement.memory_budget.machine_memory_bytes", lambda: 40 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    budget = memory_budget(AutoParallelConfig())
    assert str(budget) == (
        "a budget of 9.00 GiB on each rank: nine tenths of a rank's part of this machine's 40.00 GiB"
    )
