"""Training in chunks of either producer: the whole model's numbers, and each other's bits.

Over five optimizer steps, with uneven loads, an expert and a rank without tokens:

- With ``disable_early_grad_accumulation`` the graph producer sums gradients where autograd does
  when a forward ran chunk by chunk, so chunks made on the graph and chunks made before the trace
  agree in every bit: losses, gradients, buffers, and parameters after each step.
- Chunks change the order of summation and nothing else, so from the same parameters losses and
  gradients are the whole model's to 1e-5 (norm of the difference over norm, float32).
- Behind every exchange of tokens another chunk computes, in every region of both graphs.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from capture.test_bitwise_equality import DEEPSEEK_V3, FSDP_EP, QWEN3_MOE, on
from chunks.cases import LOADS, SteppedTraining, train_in_chunks
from chunks.test_chunk_combinations import (
    BLOCKS,
    FSDP_EP4,
    MOES,
    MOES_BY_SEQUENCE,
    SLOW,
    expected_roots,
)
from training_cases import NUM_STEPS, Case

from gt_config import EpOverlapConfig
from gt_trace.testing import GlooWorkers

DEEPSEEK_EP2 = on(DEEPSEEK_V3, parallelism=FSDP_EP)
DEEPSEEK_EP4 = on(DEEPSEEK_V3, parallelism=FSDP_EP4)
QWEN3_EP2 = on(QWEN3_MOE, parallelism=FSDP_EP)
QWEN3_EP4 = on(QWEN3_MOE, parallelism=FSDP_EP4)
CASES = {
    "deepseek_v3, EP 2": DEEPSEEK_EP2,
    "deepseek_v3, EP 4": DEEPSEEK_EP4,
    "qwen3, EP 2": QWEN3_EP2,
    "qwen3, EP 4": QWEN3_EP4,
}
OVERLAPS = {"blocks": BLOCKS, "moe": MOES, "moe, sequence": MOES_BY_SEQUENCE}
# Four ranks capture two graphs for each: with all layers they are slow.
FEWER_LAYERS = {
    "deepseek_v3, EP 2, 2 layers": on(DEEPSEEK_EP2, num_layers=2),
    "qwen3, EP 4, 1 layer": on(QWEN3_EP4, num_layers=1),
}
CELLS = [
    ("deepseek_v3, EP 2, 2 layers", "blocks"),
    pytest.param("qwen3, EP 4, 1 layer", "moe, sequence", marks=SLOW),
    *(pytest.param(case, overlap, marks=SLOW) for case in CASES for overlap in OVERLAPS),
]


def on_graph(eager: EpOverlapConfig, **changes: object) -> EpOverlapConfig:
    return dataclasses.replace(eager, strategy="graph", **changes)


def check(
    by_rank: list[SteppedTraining], case: Case, runs: dict[str, EpOverlapConfig], bound: float
) -> None:
    ep = case.parallelism["expert_parallel_degree"]
    for rank, found in enumerate(by_rank):
        assert found.differences == (), f"rank {rank}"
        assert all(map(math.isfinite, found.losses)), f"rank {rank}"
        assert found.furthest < bound, f"rank {rank}, {found.furthest_of}"
        assert found.miscounted == (), f"rank {rank}"
        assert not found.is_bitwise
        assert found.verified
        num_passes = NUM_STEPS * case.gradient_accumulation_steps
        assert len(set(found.losses)) == len(found.losses) == num_passes
        assert found.changed >= {"schedule-ep-overlap", "separate-exchange-group"}
        assert found.exposed == ()
        check_regions(found, case, runs)
        check_loads(found, len(expected_roots(case, "layers.*.moe")), ep)


def check_regions(found: SteppedTraining, case: Case, runs: dict[str, EpOverlapConfig]) -> None:
    """Every chunk of every region sends its tokens there and back, and their gradients."""
    for name, overlap in runs.items():
        expected = {
            (root, direction): (0 if is_dense(case, root) else 2,) * overlap.num_chunks
            for root in expected_roots(case, overlap.module_fqn)
            for direction in ("forward", "backward")
        }
        assert found.exchanges[name] == expected


def is_dense(case: Case, root: str) -> bool:
    return case.module == "deepseek_v3" and root == "layers.0"


def check_loads(found: SteppedTraining, num_moes: int, ep: int) -> None:
    """The loads are those that the test is about, in every layer."""
    assert len(found.tokens) == len(LOADS)
    for load, layers in zip(LOADS, found.tokens, strict=True):
        assert len(layers) == num_moes
        for tokens_E in layers:
            per_rank = len(tokens_E) // ep
            if load == "uneven":
                assert max(tokens_E) > 4 * min(tokens_E)
            elif load == "an expert without tokens":
                assert [n == 0 for n in tokens_E] == [False] * (len(tokens_E) - 1) + [True]
            elif load == "a rank without tokens":
                assert not any(tokens_E[-per_rank:])
                assert all(tokens_E[:-per_rank])


@pytest.mark.parametrize(("case_name", "overlap_name"), CELLS)
def test_both_producers_train_alike_and_as_the_whole_model(
    case_name: str, overlap_name: str, four: GlooWorkers, tmp_path: Path
) -> None:
    """In both scheduled graphs the chunks of every region take turns (x' stands for gradients)::

        forward
        network           [= dispatch 0 =][= dispatch 1 =][= combine 0 =][= combine 1 =]
        compute  route 0   route 1         experts 0       experts 1      join 0         join 1

        backward
        network           [= combine' 1 =][= combine' 0 =][= dispatch' 1 =][= dispatch' 0 =]
        compute  join' 1   join' 0         experts' 1      experts' 0       route' 1         route' 0

    Where blocks chain, the join of a block runs on into the attention of the next.
    """
    case, eager = {**CASES, **FEWER_LAYERS}[case_name], OVERLAPS[overlap_name]
    graph = on_graph(eager, disable_early_grad_accumulation=True)
    runs = {"eager": eager, "graph": graph}
    check(four.run(train_in_chunks, case, str(tmp_path), runs, {}), case, runs, 1e-5)


@pytest.mark.parametrize(
    ("case_name", "extents", "overlap", "chunk_sizes"),
    [
        pytest.param(
            "qwen3, EP 2",
            {"batch_size": 4, "num_layers": 1},
            on_graph(BLOCKS, num_chunks=3),
            (1, 1, 2),
            id="3, uneven",
            marks=SLOW,
        ),
        pytest.param("deepseek_v3, EP 4", {}, on_graph(MOES), (1, 1), id="2", marks=SLOW),
        pytest.param(
            "qwen3, EP 4", {"batch_size": 3}, on_graph(MOES), (1, 2), id="2, uneven", marks=SLOW
        ),
        pytest.param(
            "deepseek_v3, EP 2",
            {"batch_size": 4},
            on_graph(BLOCKS, num_chunks=4),
            (1, 1, 1, 1),
            id="4",
            marks=SLOW,
        ),
        pytest.param(
            "deepseek_v3, EP 4",
            {"seq_len": 62, "chunked_loss": False},
            on_graph(MOES_BY_SEQUENCE, num_chunks=4),
            (15, 16, 15, 16),
            id="4 along the sequence, uneven",
            marks=SLOW,
        ),
        pytest.param(
            "deepseek_v3, EP 2",
            {"gradient_accumulation_steps": 2},
            on_graph(BLOCKS),
            (1, 1),
            id="2, gradient accumulation",
            marks=SLOW,
        ),
    ],
)
def test_chunks_on_the_graph_in_any_number_and_of_any_size_train_as_the_whole_model(
    case_name: str,
    extents: dict[str, int],
    overlap: EpOverlapConfig,
    chunk_sizes: tuple[int, ...],
    four: GlooWorkers,
    tmp_path: Path,
) -> None:
    """With gradients accumulated early, as by default."""
    case, runs = on(CASES[case_name], **extents), {"graph": overlap}
    by_rank = four.run(train_in_chunks, case, str(tmp_path), runs, {})
    check(by_rank, case, runs, 1e-5)
    assert all(found.chunk_sizes == {"graph": chunk_sizes} for found in by_rank)


@pytest.mark.slow
@pytest.mark.parametrize("overlap_name", OVERLAPS)
def test_both_producers_train_alike_in_bfloat16(
    overlap_name: str, four: GlooWorkers, tmp_path: Path
) -> None:
    """As GPUs do: each chunk rounds its gradients to bfloat16."""
    eager, case = OVERLAPS[overlap_name], on(QWEN3_EP4, param_dtype="bfloat16")
    runs = {"eager": eager, "graph": on_graph(eager, disable_early_grad_accumulation=True)}
    by_rank = four.run(train_in_chunks, case, str(tmp_path), runs, {})
    check(by_rank, case, runs, 2.0**-6)
