"""Decoders of torchtitan's that nobody prepared here train captured as they do eagerly.

gpt_oss has experts of its own, sinks in its attention, and a window in every other layer, which the
sequences exceed. muse_glimmer has windows, layers without rotary embeddings, and norms of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from flex_attention.cases import compare
from training_cases import NUM_STEPS, NUM_UNSEEN_BATCHES, Case, Comparison, compare_modes

from gt_trace.testing import GlooWorkers

FSDP_TP = {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}
FSDP_EP = {"data_parallel_shard_degree": 4, "expert_parallel_degree": 2}


def gpt_oss(**changes: object) -> Case:
    return Case(
        module="gpt_oss",
        config="gpt_oss_debugmodel_flex",
        seq_len=160,
        expert_width=128,
        **changes,
    )


def muse_glimmer(**changes: object) -> Case:
    return Case(
        module="muse_glimmer",
        config="muse_glimmer_debugmodel",
        seq_len=144,
        num_layers=4,
        **changes,
    )


def check(found: list[Comparison]) -> None:
    for rank, comparison in enumerate(found):
        assert comparison.differences == (), f"rank {rank}"
        assert len(comparison.losses) == NUM_STEPS + NUM_UNSEEN_BATCHES
        assert len(set(comparison.losses)) > NUM_STEPS
        assert comparison.without_gradient == ()
        assert comparison.num_captures == 1
        assert comparison.verified


@pytest.mark.parametrize("case", [gpt_oss(), muse_glimmer()], ids=["gpt_oss", "muse_glimmer"])
def test_captured_equals_eager(case: Case, one: GlooWorkers, tmp_path: Path) -> None:
    check(one.run(compare_modes, case, str(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        gpt_oss(parallelism=FSDP_TP),
        gpt_oss(parallelism=FSDP_EP, fsdp_bucketing="off"),
        muse_glimmer(parallelism=FSDP_TP),
    ],
    ids=["gpt_oss, FSDP 2 x TP 2", "gpt_oss, FSDP 4 x EP 2", "muse_glimmer, FSDP 2 x TP 2"],
)
def test_captured_equals_eager_on_four_ranks(case: Case, four: GlooWorkers, tmp_path: Path) -> None:
    check(four.run(compare_modes, case, str(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("case", [gpt_oss(), muse_glimmer()], ids=["gpt_oss", "muse_glimmer"])
def test_attention_on_cpu_is_that_of_gpus(case: Case, one: GlooWorkers, tmp_path: Path) -> None:
    """With torchtitan's own FlexAttention, masks and windows, captured too, the losses are close."""
    theirs = one.run(compare, case, str(tmp_path / "flex"))
    check(theirs)
    ours = one.run(compare_modes, case, str(tmp_path / "cpu"))
    assert ours[0].losses == pytest.approx(theirs[0].losses, rel=2e-3)
    assert ours[0].losses != theirs[0].losses
