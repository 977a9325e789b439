"""Both backends of placed models get the very same graph: they differ in what they do to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from placement.capture_cases import captured_before_passes
from placement.placed_models import DEEPSEEK_V3, LLAMA3
from training_cases import Case

from gt_config import AutoParallelConfig
from gt_trace.testing import GlooWorkers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "solver", "collective"),
    [
        pytest.param(
            LLAMA3, AutoParallelConfig(memory_budget_gib=0.025), "all_gather", id="llama3"
        ),
        pytest.param(
            DEEPSEEK_V3,
            AutoParallelConfig(experts="expert_parallel"),
            "all_to_all",
            id="deepseek_v3",
        ),
    ],
)
def test_both_backends_get_the_same_graph(
    case: Case, solver: AutoParallelConfig, collective: str, one: GlooWorkers, tmp_path: Path
) -> None:
    texts = [
        one.run(captured_before_passes, case, solver, backend, str(tmp_path / backend))[0]
        for backend in ("none", "full", "autoparallel_backend")
    ]
    assert collective in texts[0]
    assert texts[1] == texts[0]
    assert texts[2] == texts[0]
