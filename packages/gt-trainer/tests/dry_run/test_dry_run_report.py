"""What a dry run says of a plan beside the same run placed by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gt_trainer.dry_run.dry_run_report import PlacedByHand
from gt_trainer.dry_run.simulated_step import SimulatedStep


def run(step_us: float, exposed_us: float, peak_gib: float, *, fits: bool = True) -> Any:
    """As much of a simulated run as is asked for."""
    return SimpleNamespace(
        step_us=step_us, all_exposed_us=exposed_us, peak_bytes=int(peak_gib * 2**30), fits=fits
    )


def test_says_time_exposed_communication_and_memory_of_both() -> None:
    beside = PlacedByHand(planned=run(90e3, 5e3, 60.0), by_hand=run(100e3, 10e3, 40.0))
    assert str(beside) == (
        "Planned and placed by hand at the same degrees, both simulated\n"
        "  planned          90.0 ms a step, 5.0 ms exposed communication, 60.00 GiB\n"
        "  by hand          100.0 ms a step, 10.0 ms exposed communication, 40.00 GiB\n"
        "  the plan takes   10.0% less time, 50.0% more memory"
    )


def test_of_pipelines_communication_between_actions_is_exposed_too() -> None:
    pipeline = object.__new__(SimulatedStep)
    facts = {
        "sensitivity": SimpleNamespace(time_us=90e3),
        "runs": [
            SimpleNamespace(count=1.5, graph=SimpleNamespace(exposed_us=1e3)),
            SimpleNamespace(count=3, graph=SimpleNamespace(exposed_us=0.5e3)),
        ],
        "schedule": SimpleNamespace(time=SimpleNamespace(gathers=3e3, transfers=4e3)),
        "memory": [SimpleNamespace(peak_bytes=gib * 2**30) for gib in (50, 60)],
        "hardware": SimpleNamespace(hbm_capacity_bytes=80 * 2**30),
    }
    for name, value in facts.items():
        object.__setattr__(pipeline, name, value)
    lines = str(PlacedByHand(planned=pipeline, by_hand=run(100e3, 0.0, 40.0))).splitlines()
    assert lines[1] == "  planned          90.0 ms a step, 10.0 ms exposed communication, 60.00 GiB"


def test_says_which_does_not_fit() -> None:
    beside = PlacedByHand(planned=run(2e3, 0.0, 10.0), by_hand=run(1e3, 0.0, 100.0, fits=False))
    lines = str(beside).splitlines()
    assert lines[2].endswith("100.00 GiB (DOES NOT FIT)")
    assert lines[3] == "  the plan takes   100.0% more time, 90.0% less memory"
