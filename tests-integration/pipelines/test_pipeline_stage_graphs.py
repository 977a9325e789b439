"""Stages of llama3 and deepseek_v3: every split recomposes, and overlap keeps every bit.

On four ranks, with FSDP, TP and EP. Both stages are on every rank; schedules and transfers are
tested with the runner.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pipelines.stage_cases import examine_stages, with_layers
from training_cases import Case

from gt_trace.testing import GlooWorkers

LLAMA3 = Case(module="llama3", config="llama3_debugmodel", chunked_loss=False)
DEEPSEEK_V3 = Case(module="deepseek_v3", config="deepseek_v3_debugmodel", chunked_loss=False)


@pytest.mark.parametrize(
    ("case", "has_exchanges", "num_summed"),
    [
        pytest.param(
            with_layers(LLAMA3, 2, data_parallel_shard_degree=2, tensor_parallel_degree=2),
            True,
            5,  # norms of the sequence: two of each layer, and the last
            id="llama3, FSDP 2 x TP 2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            with_layers(LLAMA3, 2, data_parallel_shard_degree=4),
            False,
            0,
            id="llama3, FSDP 4",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            with_layers(DEEPSEEK_V3, 3, data_parallel_shard_degree=4, expert_parallel_degree=2),
            True,
            0,
            id="deepseek_v3, FSDP 4 x EP 2",
            marks=pytest.mark.slow,  # pipelines of it train in test_pipelined_training.py
        ),
    ],
)
def test_splits_recompose_and_overlap_keeps_every_bit(
    case: Case, has_exchanges: bool, num_summed: int, four: GlooWorkers, tmp_path: Path
) -> None:
    for found in four.run(examine_stages, case, str(tmp_path)):
        assert found.not_recomposed == ()
        assert found.not_as_eager == ()
        assert found.not_as_alone == ()
        assert found.exposed == ()
        assert (found.num_exposed_in_sequence > 0) == has_exchanges
        counts = dict(found.num_collectives)
        assert counts["UNSHARD"] > 0
        # Gradients of what tensor-parallel ranks hold whole are summed over them, too, once a step.
        assert counts["REDUCE_GRAD"] == counts["UNSHARD"] + num_summed
        assert (counts["FORWARD"] > 0) == has_exchanges
        assert counts["BACKWARD_WEIGHT"] + counts["BACKWARD_INPUT"] == (counts["FULL_BACKWARD"])
