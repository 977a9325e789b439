"""Parameters gathered in 8 bits: the same bits of every result, half the bytes, few all-reduces."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from pipelines.cases import PipelineCase
from quantization.quantized_gather_cases import (
    NUM_STEPS,
    Both,
    compare_gathers,
    compare_pipelined_gathers,
)
from training_cases import NUM_UNSEEN_BATCHES, Case

from gt_trace.testing import GlooWorkers
from gt_trainer.quantization.quantization_options import QuantizationConfig

pytest.importorskip(
    "torchao", reason="torchao is not installed; `make test` runs this folder with it"
)

FSDP = {"data_parallel_shard_degree": 4}
FSDP_TP = {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}
BLOCKS = ("layers.0", "layers.1")


TENSORWISE = QuantizationConfig(linears="float8_tensorwise", skip=("lm_head",), emulate=True)


def run(
    workers: GlooWorkers,
    folder: Path,
    parallelism: dict[str, int],
    *,
    param_dtype: str = "bfloat16",
    quantization: QuantizationConfig = TENSORWISE,
    **options: object,
) -> list[Both]:
    case = Case(
        module="llama3",
        config="llama3_debugmodel",
        parallelism=parallelism,
        seq_len=32,
        param_dtype=param_dtype,
        quantization=quantization,
    )
    found = workers.run(compare_gathers, case, str(folder), options)
    for rank, each in enumerate(found):
        assert each.differences == (), f"rank {rank}"
        assert len(set(each.losses)) == NUM_STEPS + NUM_UNSEEN_BATCHES
        assert each.verified
        assert each.plain.num_maxima == {}
        assert each.plain.bytes_as_quantized == 0
    return found


def check_bytes(each: Both, *, itemsize: int) -> None:
    """What is gathered in 8 bits was gathered in so many bytes an element."""
    saved = each.plain.bytes_as_they_are - each.quantized.bytes_as_they_are
    assert each.quantized.bytes_as_quantized > 0
    assert saved == itemsize * each.quantized.bytes_as_quantized


def test_fsdp_gathers_half_the_bytes_after_one_reduction_of_maxima_a_block(
    four: GlooWorkers, tmp_path: Path
) -> None:
    for each in run(four, tmp_path, FSDP):
        assert each.refusals == ()
        check_bytes(each, itemsize=2)
        assert each.quantized.num_maxima == dict.fromkeys(BLOCKS, 1)


@pytest.mark.slow
def test_tensor_parallel_maxima_are_reduced_once_more_for_a_block(
    four: GlooWorkers, tmp_path: Path
) -> None:
    for each in run(four, tmp_path, FSDP_TP):
        check_bytes(each, itemsize=2)
        assert each.quantized.num_maxima == dict.fromkeys(BLOCKS, 2)


@pytest.mark.slow
@pytest.mark.parametrize("memory_policy", ["selective", "full_recompute"])
def test_what_is_gathered_again_has_the_scales_of_the_forward(
    memory_policy: str, four: GlooWorkers, tmp_path: Path
) -> None:
    for each in run(four, tmp_path, FSDP, param_dtype="float32", memory_policy=memory_policy):
        check_bytes(each, itemsize=4)
        assert each.quantized.num_maxima == dict.fromkeys(BLOCKS, 1)


@pytest.mark.slow
@pytest.mark.parametrize("memory_policy", ["save_all", "selective"])
def test_shards_that_are_padded_are_quantized_with_their_padding(
    memory_policy: str, tmp_path: Path
) -> None:
    """Three ranks: of 256 rows the last has two less than the others."""
    with GlooWorkers(3, timeout=600, preload=["gt_trainer.testing"]) as three:
        degree = {"data_parallel_shard_degree": 3}
        for each in run(three, tmp_path, degree, memory_policy=memory_policy):
            assert each.refusals == ()
            check_bytes(each, itemsize=2)
            assert each.quantized.num_maxima == dict.fromkeys(BLOCKS, 1)


@pytest.mark.slow
def test_what_the_backward_alone_reads_by_powers_of_two_is_quantized_too(
    four: GlooWorkers, tmp_path: Path
) -> None:
    """The forward has scales of rows, and gathers weights as they are; the backward has one."""
    mixed = dataclasses.replace(TENSORWISE, linears="float8_rowwise_with_gw_hp")
    for each in run(four, tmp_path, FSDP, quantization=mixed, memory_policy="selective"):
        (reason,) = set(each.refusals)  # of the forward
        assert reason.startswith("it has a scale for each row or column")
        check_bytes(each, itemsize=2)
        assert each.quantized.num_maxima == dict.fromkeys(BLOCKS, 1)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_pipeline_quantizes_where_it_gathers_once_for_all_microbatches(
    schedule: str, four: GlooWorkers, tmp_path: Path
) -> None:
    """Two ranks of a stage: their maxima and sums have one order."""
    model = Case(
        module="llama3",
        config="llama3_debugmodel",
        num_layers=4,
        parallelism={"data_parallel_shard_degree": 2},
        seq_len=32,
        param_dtype="bfloat16",
        quantization=TENSORWISE,
    )
    case = PipelineCase(model=model, schedule=schedule)
    found = four.run(compare_pipelined_gathers, case, str(tmp_path))
    blocks: list[str] = []
    for each in found:
        assert each.differences == ()
        assert each.verified
        assert each.plain.num_maxima == {}
        check_bytes(each, itemsize=2)
        assert {*each.quantized.num_maxima.values()} == {1}
        blocks += each.quantized.num_maxima
    assert sorted({*blocks}) == [f"layers.{n}" for n in range(4)]
    assert {len(each.losses) for each in found} == {0, NUM_STEPS * case.num_microbatches}
