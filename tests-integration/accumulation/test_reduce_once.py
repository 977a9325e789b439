"""Microbatches that gather and reduce once: the bits of a sum that is reduced once, in training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accumulation.accumulation_cases import compare_with_one_reduction
from training_cases import Case

from gt_trace.testing import GlooWorkers

LLAMA3 = Case(
    module="llama3",
    config="llama3_debugmodel",
    seq_len=32,
    batch_size=1,
    gradient_accumulation_steps=3,
    parallelism={"data_parallel_shard_degree": 2},
)
DEEPSEEK_V3 = Case(
    module="deepseek_v3",
    config="deepseek_v3_debugmodel",
    seq_len=32,
    batch_size=1,
    gradient_accumulation_steps=3,
    parallelism={"data_parallel_shard_degree": 2, "expert_parallel_degree": 2},
)


@pytest.fixture(scope="module")
def two() -> Iterator[GlooWorkers]:
    """Two ranks, whose sums have one order."""
    with GlooWorkers(2, timeout=600, preload=["gt_trainer.testing"]) as workers:
        yield workers


@pytest.mark.parametrize("case", [LLAMA3, DEEPSEEK_V3], ids=["llama3", "deepseek_v3, EP 2"])
def test_losses_and_gradients_are_those_of_sums_that_are_reduced_once(
    case: Case, two: GlooWorkers, tmp_path: Path
):
    for found in two.run(compare_with_one_reduction, case, str(tmp_path)):
        assert found.differences == ()
        assert found.num_gradients > 20
        print(found)
