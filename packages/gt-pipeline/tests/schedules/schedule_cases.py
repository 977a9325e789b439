"""Schedules for tests: of any name and size that there is, and from a few lines of text."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from gt_pipeline.schedules import SCHEDULE_NAMES, Schedule, parse_action, schedule_of

SLOW_MACHINES = settings(deadline=None, max_examples=50)
"""For tests that draw whole schedules: how long one takes says nothing."""

STAGES_PER_RANK = {
    "GPipe": [1],
    "1F1B": [1],
    "Interleaved1F1B": [1, 2, 3],
    "InterleavedZeroBubble": [1, 2, 3],
    "ZBVZeroBubble": [2],
    "DualPipeV": [2],
}


def natural_schedule(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    """Of a name, with two stages a rank where there can be two."""
    return schedule_of(
        name,
        num_ranks=num_ranks,
        num_stages=num_ranks * (2 if 2 in STAGES_PER_RANK[name] else 1),
        num_microbatches=num_microbatches,
    )


@st.composite
def named_schedules(draw: st.DrawFn, max_ranks: int = 5) -> Schedule:
    """Any schedule that has a name, in any small size that it can have."""
    name = draw(st.sampled_from(SCHEDULE_NAMES))
    num_ranks = draw(st.integers(1, max_ranks))
    num_stages = num_ranks * draw(st.sampled_from(STAGES_PER_RANK[name]))
    fewest = num_stages if name in ("1F1B", "DualPipeV") else 1
    num_microbatches = draw(st.integers(fewest, fewest + 3 * num_ranks))
    if name.startswith("Interleaved"):
        num_microbatches -= num_microbatches % max(1, num_microbatches // num_ranks)
    return schedule_of(
        name, num_ranks=num_ranks, num_stages=num_stages, num_microbatches=num_microbatches
    )


def schedule_of_text(
    *ranks: str, stage_to_rank: tuple[int, ...], num_microbatches: int = 1
) -> Schedule:
    """One that nobody has checked, from the actions of each rank."""
    return Schedule(
        name="by hand",
        num_microbatches=num_microbatches,
        stage_to_rank=stage_to_rank,
        compute=tuple(tuple(parse_action(text) for text in rank.split()) for rank in ranks),
    )


def text_of(rows: tuple[tuple[object, ...], ...]) -> str:
    """One line for each rank."""
    return "\n".join(" ".join(map(str, row)) for row in rows)
