"""What a recorded step tells: every action in order, and as many live chunks as were planned."""

from __future__ import annotations

import pytest
from runner_cases import record, schedule

from gt_pipeline.schedules import SCHEDULE_NAMES, lower, peak_live
from gt_trace.testing import GlooWorkers


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_peak_live_chunks_are_those_of_the_schedule(four: GlooWorkers, name: str) -> None:
    observed = tuple(each.peak_live for each in four.run(record, name))
    assert observed == peak_live(schedule(name))
    assert max(observed) > 1


def test_spans_are_the_lowered_actions_one_after_the_other(four: GlooWorkers) -> None:
    lowered = lower(schedule("DualPipeV"), unshards=True, reduces=True)
    for rank, recorded in enumerate(four.run(record, "DualPipeV")):
        assert recorded.rank == rank
        assert tuple(span.action for span in recorded.spans) == lowered.actions[rank]
        assert {span.rank for span in recorded.spans} == {rank}
        ends = [0.0, *(span.end for span in recorded.spans)]
        assert all(
            before <= span.start <= span.end
            for before, span in zip(ends[:-1], recorded.spans, strict=True)
        )
        assert recorded.spans[0].start == 0
