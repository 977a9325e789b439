"""Whoever starts a dry run of a pipeline waits for reasons once, and not once for each stage."""

from __future__ import annotations

from typing import Any

import pytest

from gt_trainer.placement import reasons
from gt_trainer.placement.planned_machine import PlannedMachine, planned_for

PLAN: Any = object()


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of the searches that were made."""
    found: list[float] = []

    def next_best_layouts(plan: object, *, time_limit_seconds: float) -> dict[str, object]:
        found.append(time_limit_seconds)
        return {"weight": plan}

    monkeypatch.setattr(reasons, "next_best_layouts", next_best_layouts)
    return found


def test_the_time_is_divided_among_the_plans_of_a_run(limits: list[float]) -> None:
    with planned_for(PlannedMachine(hardware=None, is_simulated=True)):
        assert reasons.reasons_of_dry_run(PLAN) == {"weight": PLAN}
        reasons.reasons_of_dry_run(PLAN, num_plans=4)
    assert limits == [reasons.REASON_SECONDS, reasons.REASON_SECONDS / 4]


def test_a_real_run_waits_for_no_reasons(limits: list[float]) -> None:
    assert reasons.reasons_of_dry_run(PLAN) == {}
    assert limits == []
