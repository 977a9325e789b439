"""Microbatches that gather and reduce once: the bits of a sum that is reduced once, in training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accumulation.cases import (
    Found,
    compare_with_one_reduction,
    error_of_bad_gradients,
    error_of_unlike_microbatches,
    trained,
)
from training_cases import Case

from gt_config import EpOverlapConfig
from gt_config.compile_config import ChunkProducer
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


EXCHANGES = {"all_to_all_single": 5}
"""Of one microbatch: each layer's tokens there and back, and again in the backward."""


@pytest.mark.parametrize(
    ("case", "exchanges"), [(LLAMA3, {}), (DEEPSEEK_V3, EXCHANGES)], ids=["llama3", "deepseek_v3"]
)
def test_losses_and_gradients_are_those_of_sums_that_are_reduced_once(
    case: Case, exchanges: dict[str, int], two: GlooWorkers, tmp_path: Path
):
    for found in two.run(compare_with_one_reduction, case, str(tmp_path)):
        _check(found)
        first, further, last = found.collectives
        # A bucket for the embedding, each of two layers, and what is after them.
        assert first == {"all_gather_into_tensor": 4, **exchanges}
        assert further == exchanges
        assert last == {"reduce_scatter_tensor": 4, **exchanges}


FSDP_TP = {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}
CP_TP = {"context_parallel_degree": 2, "tensor_parallel_degree": 2}
HSDP = {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "options"),
    [
        (replace(LLAMA3, parallelism=FSDP_TP), {}),
        (replace(LLAMA3, parallelism=FSDP_TP), {"memory_policy": "full_recompute"}),
        (replace(LLAMA3, parallelism=HSDP), {"memory_policy": "selective"}),
        (replace(LLAMA3, parallelism=HSDP), {"memory_policy": "offload", "prefetch_layers": 2}),
        (replace(LLAMA3, parallelism=HSDP, chunked_loss=False), {"fsdp_bucketing": "off"}),
        (replace(LLAMA3, parallelism=HSDP, num_layers=4), {"capture_layers": "stamped"}),
        (replace(LLAMA3, parallelism=CP_TP), {}),
        (replace(LLAMA3, parallelism=FSDP_TP), {"cuda_graphs": True}),
        (
            replace(LLAMA3, parallelism=HSDP),
            {"cuda_graphs": True, "memory_policy": "offload", "prefetch_layers": 2},
        ),
    ],
    ids=[
        "TP",
        "TP, recomputed",
        "HSDP",
        "HSDP, offloaded",
        "HSDP, no buckets",
        "HSDP, stamped",
        "CP x TP",
        "TP, recorded",
        "HSDP, offloaded, recorded",
    ],
)
def test_so_are_those_of_other_meshes_and_options(
    case: Case, options: dict[str, Any], four: GlooWorkers, tmp_path: Path
):
    for found in four.run(compare_with_one_reduction, case, str(tmp_path), options):
        _check(found)


def _check(found: Found) -> None:
    assert found.differences == ()
    assert found.num_gradients > 20
    assert len(found.losses) == 2


@pytest.mark.slow
def test_a_run_is_validated_and_resumed_to_the_bit(two: GlooWorkers, tmp_path: Path):
    whole = two.run(trained, LLAMA3, "reduce_once", 4, str(tmp_path / "whole"))[0]
    two.run(trained, LLAMA3, "reduce_once", 2, str(tmp_path / "parts"))
    resumed = two.run(trained, LLAMA3, "reduce_once", 4, str(tmp_path / "parts"))[0]
    assert [step for step, _, _ in whole.losses] == [1, 2, 3, 4]
    assert resumed == whole
    # What it differs in from a reduction for each microbatch is the order of sums.
    each = two.run(trained, LLAMA3, "every_microbatch", 4, str(tmp_path / "each"))[0]
    assert whole.losses[0][1] == each.losses[0][1]  # before any update: to the bit
    for found, expected in zip(whole.losses, each.losses, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["graph", "eager"])
def test_chunks_that_overlap_exchanges_train_alike(
    strategy: ChunkProducer, two: GlooWorkers, tmp_path: Path
):
    overlap = EpOverlapConfig(enabled=True, strategy=strategy, module_fqn="layers.*.moe")
    case, options = replace(DEEPSEEK_V3, batch_size=2), {"ep_overlap": overlap}
    once, each = (
        two.run(trained, case, accumulation, 2, str(tmp_path / accumulation), options)[0]
        for accumulation in ("reduce_once", "every_microbatch")
    )
    assert once.losses[0][1] == each.losses[0][1]  # before any update: to the bit
    for found, expected in zip(once.losses, each.losses, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def test_gradients_that_are_not_finite_end_the_run_before_an_update(
    two: GlooWorkers, tmp_path: Path
):
    for message, has_changed in two.run(error_of_bad_gradients, LLAMA3, str(tmp_path)):
        assert "step 1: gradients are not finite (NaN or infinite)." in message
        assert not has_changed


def test_microbatches_of_two_shapes_are_refused(two: GlooWorkers, tmp_path: Path):
    for message in two.run(error_of_unlike_microbatches, LLAMA3, str(tmp_path)):
        assert message == (
            "microbatch 2 of this step has shapes {'input': (1, 16), 'positions': (1, 16), "
            "'labels': (1, 16)}, and the first {'input': (1, 32), 'positions': (1, 32), 'labels': "
            "(1, 32)}: microbatches that gather and reduce once run the same graphs. Give batches "
            "of one shape, or --compile.accumulation every_microbatch"
        )
