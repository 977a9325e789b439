"""EP overlap's eager strategy on torchtitan's models: the same numbers, and chunks after all passes.

Chunks change the order of summation and nothing else, so losses and gradients agree to rounding
and token counts agree in every bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from eager_chunk_training import ChunkedTraining, compare_chunked
from test_bitwise_equality import DEEPSEEK_V3, FSDP_EP, FSDP_TP_EP, QWEN3_MOE, on

from gt_config import EpOverlapConfig
from gt_trace.testing import GlooWorkers

FSDP_EP4 = {**FSDP_EP, "expert_parallel_degree": 4}


def overlap(module_fqn: str, chunk_dim: str) -> EpOverlapConfig:
    return EpOverlapConfig(
        enabled=True, strategy="eager", module_fqn=module_fqn, chunk_dim=chunk_dim
    )


BLOCKS = overlap("layers.*", "batch")
MOES = overlap("layers.*.moe", "batch")
MOES_BY_SEQUENCE = overlap("layers.*.moe", "seq")

ROOTS = {"blocks": (BLOCKS, {}), "moe": (MOES, {}), "moe, sequence": (MOES_BY_SEQUENCE, {})}
# Four ranks capture each of them: what is left out here is slow.
FEW = {name: ROOTS[name] for name in ("blocks", "moe, sequence")}
SLOW = pytest.mark.slow
POLICIES = {
    policy: (BLOCKS, {"memory_policy": policy})
    for policy in ("selective", "full_recompute", "offload")
}

# The first of deepseek_v3's layers is dense.
EXPECTED_ROOTS = {
    ("deepseek_v3", "layers.*"): ("layers.0", "layers.1", "layers.2"),
    ("deepseek_v3", "layers.*.moe"): ("layers.1.moe", "layers.2.moe"),
    ("qwen3", "layers.*"): ("layers.0", "layers.1"),
    ("qwen3", "layers.*.moe"): ("layers.0.moe", "layers.1.moe"),
}


def check(found: ChunkedTraining, module: str, module_fqn: str) -> None:
    assert found.largest_difference < 1e-5, found.largest_of
    assert not found.is_bitwise
    assert found.differing_buffers == ()
    assert found.verified
    roots = EXPECTED_ROOTS[module, module_fqn]
    assert sorted(found.regions) == [
        (root, direction, 2) for root in roots for direction in ("backward", "forward")
    ]


@pytest.mark.parametrize(
    ("case", "runs"),
    [
        pytest.param(on(DEEPSEEK_V3, parallelism=FSDP_EP), FEW, id="deepseek_v3, EP 2, some"),
        pytest.param(
            on(DEEPSEEK_V3, parallelism=FSDP_EP), ROOTS, id="deepseek_v3, EP 2", marks=SLOW
        ),
        pytest.param(on(QWEN3_MOE, parallelism=FSDP_EP4), ROOTS, id="qwen3, EP 4", marks=SLOW),
        pytest.param(
            on(QWEN3_MOE, parallelism=FSDP_EP), POLICIES, id="qwen3, memory policies", marks=SLOW
        ),
        pytest.param(
            on(DEEPSEEK_V3, parallelism=FSDP_TP_EP),
            ROOTS,
            id="deepseek_v3, TP 2 x EP 2",
            marks=SLOW,
        ),
    ],
)
def test_chunks_change_only_the_order_of_sums(four: GlooWorkers, tmp_path: Path, case, runs):
    for found in four.run(compare_chunked, case, str(tmp_path), runs):
        assert found.keys() == runs.keys()
        for name, training in found.items():
            check(training, case.module, runs[name][0].module_fqn)
