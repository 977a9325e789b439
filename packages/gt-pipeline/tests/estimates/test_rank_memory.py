"""The peak of a rank: the sum of its parts, and what the schedule says is live."""

from __future__ import annotations

from dataclasses import replace

import pytest
from schedule_cases import natural_schedule

from gt_pipeline.estimates import MEMORY_PARTS, ActionMemory, StageMemory, rank_memory
from gt_pipeline.schedules import SCHEDULE_NAMES, lower, peak_live

_RUNNING = ActionMemory(extra_bytes=7, launched_bytes=0, num_unsized=0)
_KINDS = ("UNSHARD", "FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "REDUCE_GRAD")
STAGE = StageMemory(
    state_bytes=1000,
    num_parameters=200,
    parameter_bytes=800,
    gathered_bytes=0,
    saved_bytes=0,
    between_bytes=0,
    accumulated_bytes=0,
    reduced_bytes=0,
    entering_bytes=0,
    leaving_bytes=0,
    actions=dict.fromkeys(_KINDS, _RUNNING),
)


def peak(name: str, rank: int, stage: StageMemory, **options: bool):
    schedule = natural_schedule(name, 4, 8)
    lowered = lower(schedule, unshards=True, reduces=True)
    return rank_memory(
        lowered,
        rank=rank,
        stages=dict.fromkeys(range(schedule.num_stages), stage),
        pair=lambda action: _RUNNING,
        **options,
    )


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize("rank", [0, 3])
def test_the_peak_is_the_sum_of_its_parts(name: str, rank: int) -> None:
    stage = replace(
        STAGE,
        gathered_bytes=300,
        saved_bytes=50,
        between_bytes=20,
        accumulated_bytes=400,
        reduced_bytes=800,
        entering_bytes=3,
        leaving_bytes=5,
    )
    found = peak(name, rank, stage)
    assert sum(found.peak.bytes_by_part.values()) == found.peak_bytes
    assert tuple(found.peak.bytes_by_part) == MEMORY_PARTS
    assert found.peak_bytes == max(each.num_bytes for each in found.moments)
    first, *_, last = found.moments
    assert str(first.action).startswith(f"{rank}U")
    assert last.action is None
    num_stages = 1 if name in ("GPipe", "1F1B") else 2
    assert found.peak.bytes_by_part["parameters and buffers"] == 1000 * num_stages
    assert found.peak.bytes_by_part["optimizer state"] == 2 * 800 * num_stages


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_activations_are_those_of_the_chunks_that_are_live(name: str) -> None:
    live = peak_live(natural_schedule(name, 4, 8))
    for rank in range(4):
        # Halves of a backward hold as much between them, and nothing else counts.
        found = peak(name, rank, replace(STAGE, saved_bytes=10**6, between_bytes=10**6))
        before = live[rank] - (
            found.peak.action is not None and found.peak.action.kind == "FORWARD"
        )
        assert found.peak.bytes_by_part["activations"] >= 10**6 * (before - 1)
        held = max(moment.bytes_by_part["activations"] for moment in found.moments)
        # While a pair of DualPipeV runs, what it makes and what it frees both count as live.
        assert live[rank] - (name == "DualPipeV") <= held / 10**6 <= live[rank]


def test_1f1b_keeps_one_microbatch_less_on_each_rank() -> None:
    held = [
        peak("1F1B", rank, replace(STAGE, saved_bytes=10**6)).peak.bytes_by_part["activations"]
        for rank in range(4)
    ]
    assert held == [4 * 10**6, 3 * 10**6, 2 * 10**6, 10**6]


def test_gradients_of_runs_before_are_held_where_the_schedule_accumulates() -> None:
    stage = replace(STAGE, accumulated_bytes=500, reduced_bytes=100)
    once, again = peak("1F1B", 0, stage), peak("1F1B", 0, stage, accumulates=True)
    assert again.peak_bytes == once.peak_bytes + 100


def test_sums_of_gradients_are_held_until_the_reduction_is_waited_for() -> None:
    """A stage's reduction is launched behind its last backward, and finished with the others."""
    launched = replace(_RUNNING, launched_bytes=10)
    stage = replace(
        STAGE,
        accumulated_bytes=500,
        reduced_bytes=100,
        actions={**STAGE.actions, "REDUCE_GRAD": launched},
    )
    found = peak("Interleaved1F1B", 0, stage)
    assert found.peak.bytes_by_part["gradients"] == 2 * 500 + 2 * 10
    assert found.peak.action is not None
    assert found.peak.action.kind == "REDUCE_GRAD"


def test_what_is_sent_is_held_until_it_has_arrived() -> None:
    stage = replace(STAGE, leaving_bytes=10**6)
    # The first rank's output of a microbatch is held until its gradient shows that it was used;
    # the last rank's goes nowhere.
    assert peak("1F1B", 0, stage).peak.bytes_by_part["transfers"] >= 3 * 10**6
    assert peak("1F1B", 3, stage).peak.bytes_by_part["transfers"] == 0
