"""Chunks made before a trace and chunks made on its graph are the same, in every bit.

With ``disable_early_grad_accumulation`` the graph producer casts and sums gradients where autograd
does when a forward ran chunk by chunk. The regions are the same too, and in both scheduled graphs
compute of the other chunk stands between the launch and the wait of every exchange.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from chunk_producers import compare_producers
from test_bitwise_equality import DEEPSEEK_V3, FSDP_EP, QWEN3_MOE, on
from test_eager_chunk_training import BLOCKS, FSDP_EP4, MOES, MOES_BY_SEQUENCE
from training_cases import Case

from gt_trace.testing import GlooWorkers

OVERLAPS = {"blocks": BLOCKS, "moe": MOES, "moe, sequence": MOES_BY_SEQUENCE}


@pytest.mark.parametrize(
    ("case", "names"),
    [
        pytest.param(on(QWEN3_MOE, parallelism=FSDP_EP4), ["blocks"], id="qwen3, EP 4, blocks"),
        pytest.param(
            on(QWEN3_MOE, parallelism=FSDP_EP4),
            list(OVERLAPS),
            id="qwen3, EP 4",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            on(DEEPSEEK_V3, parallelism=FSDP_EP),
            list(OVERLAPS),
            id="deepseek_v3, EP 2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_both_producers_compute_the_same_bits(
    case: Case, names: list[str], four: GlooWorkers, tmp_path: Path
) -> None:
    overlaps = {name: OVERLAPS[name] for name in names}
    for found in four.run(compare_producers, case, str(tmp_path), overlaps):
        assert found == dict.fromkeys(names, ((), (), ()))
