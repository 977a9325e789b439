"""A trainer's own hooks on the inputs of captures: they run in every form of capture."""

from __future__ import annotations

from pathlib import Path

import pytest
from capture.preparer_cases import (
    CASE,
    compare_with_shifted_batches,
    losses_with_stored_graphs,
    refusal,
)

from gt_trace.testing import GlooWorkers


@pytest.mark.parametrize(
    ("name", "mode", "options"),
    [
        ("aot_fx_trace", "aot_fx_trace", {}),
        pytest.param("aot_joint", "aot_joint", {}, marks=pytest.mark.slow),
        pytest.param(
            "reduce_once",
            "aot_fx_trace",
            {"accumulation": "reduce_once"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_preparers_make_of_a_batch_is_what_the_step_trains_on(
    name: str, mode: str, options: dict[str, str], one: GlooWorkers, tmp_path: Path
) -> None:
    [(differences, seen, matters)] = one.run(
        compare_with_shifted_batches, str(tmp_path), name, mode, options
    )
    assert differences == []
    assert matters
    assert seen == [(CASE.batch_size, CASE.seq_len)]


def test_stages_of_a_pipeline_prepare_their_inputs(two: GlooWorkers, tmp_path: Path) -> None:
    first, last = two.run(
        compare_with_shifted_batches, str(tmp_path), "pipeline", "aot_fx_trace", {}
    )
    assert first[0] == last[0] == []
    assert first[2]
    assert last[2]
    assert first[1] == [(1, CASE.seq_len)] * 2  # traced without a backward, then with one
    assert last[1] == []


@pytest.mark.parametrize(
    "mode", [pytest.param("aot_fx_trace", marks=pytest.mark.slow), "aot_joint"]
)
def test_stored_graphs_are_used_under_equal_preparers_only(
    mode: str, one: GlooWorkers, tmp_path: Path
) -> None:
    [(losses, captures)] = one.run(losses_with_stored_graphs, str(tmp_path), mode)
    assert losses[0] == losses[2] != losses[1]
    assert captures == [1, 1, 0]


def test_a_mode_that_captures_nothing_is_refused(one: GlooWorkers, tmp_path: Path) -> None:
    (found,) = one.run(refusal, "none", str(tmp_path), {})
    assert found == (
        "input preparers change the inputs of captured steps, and --compile.mode none captures "
        "nothing: return none from input_preparers() then, or choose another mode"
    )
