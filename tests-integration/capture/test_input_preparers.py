"""A trainer's own hooks on the inputs of captured steps: run once a capture, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from capture.preparer_cases import CASE, compare_with_shifted_batches, refusal

from gt_trace.testing import GlooWorkers

STORED = "--compile.artifacts, which does not say who prepared the inputs of a stored graph"


def test_what_preparers_make_of_a_batch_is_what_the_step_trains_on(
    one: GlooWorkers, tmp_path: Path
) -> None:
    [(differences, seen, matters)] = one.run(compare_with_shifted_batches, str(tmp_path))
    assert differences == []
    assert matters
    assert seen == [(CASE.batch_size, CASE.seq_len)]


@pytest.mark.parametrize(
    ("mode", "options", "what"),
    [
        ("none", {}, "--compile.mode none"),
        ("aot_joint", {}, "--compile.mode aot_joint"),
        (
            "aot_fx_trace",
            {"accumulation": "reduce_once", "artifacts": "graphs"},
            f"--compile.accumulation reduce_once, {STORED}",
        ),
    ],
)
def test_options_that_would_leave_preparers_out_are_refused(
    mode: str, options: dict[str, str], what: str, one: GlooWorkers, tmp_path: Path
) -> None:
    (found,) = one.run(refusal, mode, str(tmp_path), options)
    assert found == (
        "input preparers are for whole steps captured in this run, and not with "
        f"{what}: return none from input_preparers() then, or change that"
    )
