"""EP overlap of either strategy with what else a user may ask for: the whole model's numbers.

Chunks change the order of summation and nothing else, so losses and gradients agree to rounding
and token counts agree in every bit; and behind every exchange another chunk computes, whatever
other passes did. ``test_chunk_producers.py`` has the strategies alone, over optimizer steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from capture.test_bitwise_equality import DEEPSEEK_V3, FSDP_EP, FSDP_TP_EP, QWEN3_MOE, on
from chunks.combination_cases import (
    ChunkedTraining,
    compare_chunked,
    compare_chunked_in_float64,
    error_of_an_odd_batch,
    relative_difference,
)
from training_cases import SEQ_LEN, Case

from gt_config import EpOverlapConfig
from gt_trace.testing import GlooWorkers

SLOW = pytest.mark.slow
FSDP_EP4 = {**FSDP_EP, "expert_parallel_degree": 4}


def overlap(module_fqn: str, chunk_dim: str) -> EpOverlapConfig:
    return EpOverlapConfig(
        enabled=True, strategy="eager", module_fqn=module_fqn, chunk_dim=chunk_dim
    )


BLOCKS = overlap("layers.*", "batch")
MOES = overlap("layers.*.moe", "batch")
MOES_BY_SEQUENCE = overlap("layers.*.moe", "seq")
BLOCKS_ON_GRAPH = dataclasses.replace(BLOCKS, strategy="graph")

Runs = dict[str, tuple[EpOverlapConfig, Mapping[str, Any]]]


def both(overlaps: dict[str, EpOverlapConfig], options: dict[str, Mapping[str, Any]]) -> Runs:
    """Everything with everything, by both strategies."""
    return {
        f"{strategy} {name} {asked}".strip(): (
            dataclasses.replace(each, strategy=strategy),
            options[asked],
        )
        for strategy in ("eager", "graph")
        for name, each in overlaps.items()
        for asked in options
    }


# Chunks of the sequence on the graph are refused with tensor parallelism.
WITH_TP: Runs = {
    "blocks": (BLOCKS, {"memory_policy": "full_recompute", "fsdp_second_group": True}),
    "moe": (MOES, {}),
    "moe, sequence": (MOES_BY_SEQUENCE, {}),
    "blocks on the graph": (BLOCKS_ON_GRAPH, {}),
    "moe on the graph": (dataclasses.replace(MOES, strategy="graph"), {}),
    "asynchronous": (BLOCKS_ON_GRAPH, {"async_tensor_parallel": True}),
}
POLICIES = both(
    {"blocks": BLOCKS},
    {
        name: {"memory_policy": name}
        for name in ("selective", "selective_alternate", "full_recompute", "offload")
    },
)
FSDP_OPTIONS = both(
    {"blocks": BLOCKS},
    {
        "second group": {"fsdp_second_group": True},
        "dense regions": {"fsdp_into_dense_regions": True, "prefetch_layers": 2},
    },
)
COMPILED: Runs = {
    "regional": (
        BLOCKS_ON_GRAPH,
        {
            "inductor_compilation": "regional",
            "regional_modules": ("layers.*.attention_norm", "layers.*.ffn_norm"),
        },
    ),
}
RECORDED = both({"blocks": BLOCKS}, {"recorded": {"cuda_graphs": True}})
PASS_OF_OPTION = {
    ("memory_policy", "selective"): "recompute-tagged",
    ("memory_policy", "selective_alternate"): "recompute-tagged",
    ("memory_policy", "full_recompute"): "recompute-tagged",
    ("memory_policy", "offload"): "offload-tagged",
    ("fsdp_second_group", True): "separate-reduction-group",
    ("inductor_compilation", "regional"): "compile-regions",
    ("cuda_graphs", True): "cuda-graphs",
    ("async_tensor_parallel", True): "async-tensor-parallel",
}


def expected_roots(case: Case, module_fqn: str) -> list[str]:
    """The modules that run in chunks; the first of deepseek_v3's layers is dense."""
    first = 0 if module_fqn == "layers.*" or case.module == "qwen3" else 1
    return [module_fqn.replace("*", str(number)) for number in range(first, case.num_layers)]


def check(found: ChunkedTraining, case: Case, module_fqn: str, options: Mapping[str, Any]) -> None:
    assert found.largest_difference < 1e-5, found.largest_of
    assert not found.is_bitwise
    assert found.differing_buffers == ()
    assert found.verified
    assert found.exposed == ()
    assert (found.num_replays > 0) is ("cuda_graphs" in options)
    asked = {name for option, name in PASS_OF_OPTION.items() if option in options.items()}
    assert found.changed >= {"schedule-ep-overlap", "separate-exchange-group", *asked}
    expected = [
        (root, direction, 2)
        for root in expected_roots(case, module_fqn)
        for direction in ("backward", "forward")
    ]
    assert sorted(found.regions) == sorted(expected * found.num_captures)


@pytest.mark.parametrize("strange", [math.nan, math.inf])
def test_what_is_no_finite_number_is_infinitely_far(strange: float) -> None:
    """So that no bound lets it pass, whichever side has it, or both."""
    fine, broken = torch.ones(2), torch.tensor([1.0, strange])
    for pair in ((fine, broken), (broken, fine), (broken, broken)):
        assert relative_difference(*pair) == math.inf
    assert relative_difference(fine, 2 * fine) == 1.0


@SLOW  # each captures several graphs on four ranks
@pytest.mark.parametrize(
    ("case", "runs"),
    [
        pytest.param(on(DEEPSEEK_V3, parallelism=FSDP_TP_EP), WITH_TP, id="TP 2 x EP 2"),
        *(
            pytest.param(on(QWEN3_MOE, parallelism=FSDP_EP), runs, id=name)
            for name, runs in (
                ("memory policies", POLICIES),
                ("FSDP options", FSDP_OPTIONS),
                ("compiled regions", COMPILED),
                ("recordings", RECORDED),
            )
        ),
    ],
)
def test_chunks_change_only_the_order_of_sums(
    case: Case, runs: Runs, four: GlooWorkers, tmp_path: Path
) -> None:
    for found in four.run(compare_chunked, case, str(tmp_path), runs, (SEQ_LEN,)):
        assert found.keys() == runs.keys()
        for name, training in found.items():
            chunks, options = runs[name]
            check(training, case, chunks.module_fqn, options)
            assert training.num_captures == 1


@SLOW
@pytest.mark.parametrize(
    ("compare", "bound"), [(compare_chunked, 1e-6), (compare_chunked_in_float64, 1e-13)]
)
def test_where_ranks_share_sequences_what_differs_is_rounding(
    compare: Any, bound: float, four: GlooWorkers, tmp_path: Path
) -> None:
    """It vanishes in float64. In float32 it is up to 2e-5 of what a rank has of a router's gradient."""
    degrees = {"data_parallel_shard_degree": 2, "context_parallel_degree": 2}
    case = on(QWEN3_MOE, num_layers=1, parallelism={**degrees, "expert_parallel_degree": 2})
    runs: Runs = {"eager": (BLOCKS, {}), "graph": (BLOCKS_ON_GRAPH, {})}
    for found in four.run(compare, case, str(tmp_path), runs, (SEQ_LEN,)):
        assert found.keys() == runs.keys()
        for training in found.values():
            assert training.largest_difference_of_whole < bound
            assert not training.is_bitwise
            assert training.differing_buffers == ()
            assert training.exposed == ()
            assert training.verified


@SLOW
def test_another_shape_is_captured_in_chunks_too(four: GlooWorkers, tmp_path: Path) -> None:
    case = on(QWEN3_MOE, num_layers=1, parallelism=FSDP_EP, on_shape_change="recapture")
    runs = both({"moe, sequence": MOES_BY_SEQUENCE}, {"": {}})
    lengths = (SEQ_LEN, SEQ_LEN // 2, SEQ_LEN)
    for found in four.run(compare_chunked, case, str(tmp_path), runs, lengths):
        for training in found.values():
            check(training, case, MOES_BY_SEQUENCE.module_fqn, {})
            assert training.num_captures == 2


@SLOW
def test_another_shape_that_does_not_divide_is_an_error_of_the_eager_strategy(
    four: GlooWorkers, tmp_path: Path
) -> None:
    case = on(QWEN3_MOE, num_layers=1, parallelism=FSDP_EP, on_shape_change="recapture")
    for text in four.run(error_of_an_odd_batch, case, str(tmp_path), MOES_BY_SEQUENCE):
        assert "layers.0.moe" in text
        assert "63" in text
