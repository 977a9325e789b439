"""Models that a solver placed are validated as those that were placed by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from placement.placed_models import DEEPSEEK_V3, LLAMA3
from placement.validation_cases import STEPS, validated
from training_cases import Case

from gt_config import AutoParallelConfig
from gt_trace.testing import GlooWorkers


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(LLAMA3, id="llama3"), pytest.param(DEEPSEEK_V3, id="deepseek_v3")]
)
def test_a_placed_run_validates_like_one_placed_by_hand(
    case: Case, four: GlooWorkers, tmp_path: Path
) -> None:
    solver = AutoParallelConfig(relative_gap=0.05)
    whole_loss = dataclasses.replace(case, chunked_loss=False)
    placed = four.run(validated, whole_loss, solver, str(tmp_path / "placed"))
    by_hand = four.run(validated, whole_loss, None, str(tmp_path / "by_hand"))
    assert len(placed[0].losses) == STEPS
    assert placed[0].losses == pytest.approx(by_hand[0].losses, rel=1e-5)
    assert placed[0].trained_losses == pytest.approx(by_hand[0].trained_losses, rel=1e-5)
    # The update starts the counts anew; what validation routes is not counted.
    assert [each.counted_tokens for each in placed] == [0.0] * 4
