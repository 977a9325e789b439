"""Ranks train with graphs that one of them captured, now or in an earlier run: the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from artifacts.cases import (
    Compiled,
    Trained,
    compiled,
    precompiled,
    trained,
    trained_in_stages,
)
from pipelines.cases import PipelineCase
from training_cases import Case

from gt_config import AutoParallelConfig, EpOverlapConfig
from gt_trace.testing import GlooWorkers

LLAMA3 = Case(
    module="llama3",
    config="llama3_debugmodel",
    seq_len=32,
    parallelism={"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
)
DEEPSEEK_V3 = Case(
    module="deepseek_v3",
    config="deepseek_v3_debugmodel",
    seq_len=32,
    parallelism={"data_parallel_shard_degree": 4, "expert_parallel_degree": 2},
)
SHARED_SEQUENCES = replace(
    LLAMA3, parallelism={"data_parallel_shard_degree": 2, "context_parallel_degree": 2}
)
SMALL = replace(LLAMA3, num_layers=1, batch_size=1, parallelism={"tensor_parallel_degree": 2})
ONE_RANK = Case(module="llama3", config="llama3_debugmodel", seq_len=32)
ALIKE_STAGES = PipelineCase(
    model=replace(LLAMA3, num_layers=6, parallelism={"data_parallel_shard_degree": 2}),
    schedule="Interleaved1F1B",
)
QWEN3_MOE = replace(DEEPSEEK_V3, module="qwen3", config="qwen3_moe_debugmodel")


def placed(memory_budget_gib: float, **options: Any) -> dict[str, Any]:
    """Options of a run that a solver places, by any plan of about the best price."""
    solver = AutoParallelConfig(memory_budget_gib=memory_budget_gib, relative_gap=0.03)
    return {"autoparallel": True, "autoparallel_solver": solver, **options}


def run(
    case: Case,
    folder: Path,
    artifacts: Path | None,
    options: Mapping[str, Any],
    *,
    num_ranks: int = 4,
) -> list[Trained]:
    """Train in processes of their own, as a start does."""
    where = None if artifacts is None else str(artifacts)
    with GlooWorkers(num_ranks, timeout=600, preload=["gt_trainer.testing"]) as workers:
        return workers.run(trained, case, str(folder), where, dict(options))


def run_stages(case: PipelineCase, folder: Path, artifacts: Path | None) -> list[Trained]:
    """The same of a pipeline."""
    where = None if artifacts is None else str(artifacts)
    with GlooWorkers(4, timeout=600, preload=["gt_trainer.testing"]) as workers:
        return workers.run(trained_in_stages, case, str(folder), where)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A run, and who captures in it at a cold start."""

    case: Case
    options: dict[str, Any] = field(default_factory=dict)
    captures: tuple[int, ...] = (0, 3)
    says: str = "1 group of ranks\n  ranks 0-3: captured by 0, compared with rank 3"


TP_ALONE = Expected(
    case=replace(LLAMA3, parallelism={"tensor_parallel_degree": 4}),
    captures=(0, 1, 3),  # rank 2 runs numbers that no rank has captured
    says="captured by 0, compared with ranks 1, 3; ",
)


TP = Expected(
    case=LLAMA3,
    captures=(0, 1, 2, 3),  # a neighbor along each axis, and one that confirms them
    says="1 group of ranks\n  ranks 0-3: captured by 0, compared with ranks 1-3; ",
)


PLACED = replace(TP, options=placed(0.025))


def test_a_later_start_trains_from_what_an_earlier_one_stored(tmp_path: Path):
    artifacts = tmp_path / "artifacts"
    runs = [
        run(SMALL, tmp_path / name, where, {}, num_ranks=2)
        for name, where in (("alone", None), ("cold", artifacts), ("warm", artifacts))
    ]
    assert [each.is_loaded for each in runs[1]] == [False, False]
    assert [each.is_loaded for each in runs[2]] == [True, True]
    assert "captured by 0, compared with rank 1; " in runs[1][0].log[-1]
    assert "numbers follow from the place along tp" in runs[1][0].log[-1]
    for alone, cold, warm in zip(*runs, strict=True):
        assert alone.num_gradients > 0
        assert alone.bits == cold.bits == warm.bits
        assert alone.graphs == cold.graphs == warm.graphs
        assert alone.passes == cold.passes == warm.passes


def test_a_later_start_of_a_placed_model_trains_from_what_an_earlier_one_stored(tmp_path: Path):
    case = replace(SMALL, parallelism={"data_parallel_shard_degree": 2})
    options = placed(0.02)
    cold, warm = (
        run(case, tmp_path / name, tmp_path / "artifacts", options, num_ranks=2)
        for name in ("cold", "warm")
    )
    assert [each.is_loaded for each in (*cold, *warm)] == [False, False, True, True]
    for a, b in zip(cold, warm, strict=True):
        assert a.num_gradients > 0
        assert a.bits == b.bits
        assert a.passes == b.passes


@pytest.mark.slow
@pytest.mark.parametrize(
    "expected",
    [
        TP_ALONE,
        TP,
        replace(TP_ALONE, options={"memory_policy": "selective"}),
        replace(TP_ALONE, options={"memory_policy": "full_recompute"}),
        replace(TP_ALONE, options={"memory_policy": "offload"}),
        replace(TP, options={"fsdp_second_group": True, "inductor_compilation": "regional"}),
        replace(TP_ALONE, case=replace(TP_ALONE.case, gradient_accumulation_steps=2)),
        replace(
            TP,
            case=replace(LLAMA3, gradient_accumulation_steps=2),
            options={"accumulation": "reduce_once"},
        ),
        Expected(case=DEEPSEEK_V3),
        Expected(case=DEEPSEEK_V3, options={"ep_overlap": EpOverlapConfig(enabled=True)}),
        Expected(
            case=DEEPSEEK_V3,
            options={"ep_overlap": EpOverlapConfig(enabled=True, strategy="eager")},
        ),
        Expected(case=QWEN3_MOE),
        Expected(case=SHARED_SEQUENCES),
        Expected(
            case=SHARED_SEQUENCES,
            options={"context_parallel": "ring"},
            captures=(0, 1, 2, 3),  # each sends to another part of its message
            says="1 group of ranks\n  ranks 0-3: each has its own graph, captured by ranks 0-3; ",
        ),
        replace(TP_ALONE, options={"mode": "aot_joint"}),
        replace(TP, options={"mode": "aot_joint", "joint_partitioner": "save_all"}),
        PLACED,
        replace(PLACED, options=placed(0.025, inductor_compilation="autoparallel_backend")),
        replace(PLACED, case=DEEPSEEK_V3, options=placed(0.12)),
    ],
    ids=lambda each: f"{each.case.config}-{each.case.gradient_accumulation_steps}-{each.options}",
)
def test_graphs_captured_by_few_ranks_or_before_train_all_to_the_same_bits(
    expected: Expected, tmp_path: Path
):
    artifacts = tmp_path / "artifacts"
    alone = run(expected.case, tmp_path / "alone", None, expected.options)
    cold = run(expected.case, tmp_path / "cold", artifacts, expected.options)
    warm = run(expected.case, tmp_path / "warm", artifacts, expected.options)
    assert [n for n, each in enumerate(cold) if not each.is_loaded] == [*expected.captures]
    assert all(each.is_loaded for each in warm)
    assert expected.says in cold[0].log[-1]
    assert "captured before" in warm[0].log[-1]
    for a, b, c in zip(alone, cold, warm, strict=True):
        assert a.num_gradients > 0
        assert a.bits == b.bits == c.bits
        assert a.losses == b.losses == c.losses
        assert a.passes == b.passes == c.passes
        numbered = not {"mode", "autoparallel"} & expected.options.keys()
        assert a.texts(numbered) == b.texts(numbered) == c.texts(numbered)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        PipelineCase(
            model=replace(LLAMA3, num_layers=4, parallelism={"data_parallel_shard_degree": 2}),
            schedule="1F1B",
        ),
        PipelineCase(
            model=replace(LLAMA3, num_layers=4, parallelism={"tensor_parallel_degree": 2}),
            schedule="ZBVZeroBubble",
            options={"memory_policy": "offload", "inductor_compilation": "regional"},
        ),
        PipelineCase(
            model=replace(
                DEEPSEEK_V3,
                num_layers=4,
                parallelism={"data_parallel_shard_degree": 2, "expert_parallel_degree": 2},
            ),
            schedule="DualPipeV",
            microbatch_size=2,
            overlap=EpOverlapConfig(enabled=True),
        ),
        replace(
            ALIKE_STAGES, model=replace(ALIKE_STAGES.model, num_layers=2), options=placed(0.02)
        ),
    ],
    ids=lambda each: f"{each.model.config}-{each.schedule}-{'autoparallel' in each.options}",
)
def test_stages_captured_before_train_all_to_the_same_bits(case: PipelineCase, tmp_path: Path):
    alone = run_stages(case, tmp_path / "alone", None)
    cold = run_stages(case, tmp_path / "cold", tmp_path / "artifacts")
    warm = run_stages(case, tmp_path / "warm", tmp_path / "artifacts")
    assert not any(each.is_loaded for each in (*alone, *cold))
    assert all(each.is_loaded for each in warm)
    for a, b, c in zip(alone, cold, warm, strict=True):
        assert a.num_gradients > 0
        assert a.bits == b.bits == c.bits
        assert a.losses == b.losses == c.losses
        assert a.passes == b.passes == c.passes
        assert a.graphs == b.graphs == c.graphs


@pytest.mark.slow
def test_a_stage_that_is_like_an_earlier_one_is_loaded_at_the_first_start(tmp_path: Path):
    alone = run_stages(ALIKE_STAGES, tmp_path / "alone", None)
    cold = run_stages(ALIKE_STAGES, tmp_path / "cold", tmp_path / "artifacts")
    first, later = [
        line.startswith("--compile.artifacts: loaded")
        for line in cold[0].log
        if "group" not in line
    ]
    assert (first, later) == (False, True)  # stage 2 is like stage 1, of another rank
    assert len([*(tmp_path / "artifacts").glob("*/graph")]) == 3
    for a, b in zip(alone, cold, strict=True):
        assert a.num_gradients > 0
        assert a.bits == b.bits
        assert a.passes == b.passes
        assert a.graphs == b.graphs


@pytest.mark.slow
def test_ranks_whose_graphs_hold_their_own_numbers_find_what_inductor_compiled_for_them(
    tmp_path: Path,
):
    def start(name: str) -> list[Compiled]:
        with GlooWorkers(2, timeout=600, preload=["gt_trainer.testing"]) as workers:
            options = {"inductor_compilation": "regional"}
            folder = str(tmp_path / name)
            return workers.run(compiled, SMALL, folder, str(tmp_path / "artifacts"), options)

    cold, warm = start("cold"), start("warm")
    assert len([*(tmp_path / "artifacts").glob("*/products")]) == 2
    for a, b in zip(cold, warm, strict=True):
        assert a.misses > 0
        assert (b.misses, b.trained.is_loaded) == (0, True)
        assert b.hits > 0
        assert b.trained.bits == a.trained.bits


@pytest.mark.slow
def test_what_inductor_compiled_is_found_by_a_later_start_and_trains_to_the_same_bits(
    tmp_path: Path,
):
    def start(name: str) -> Compiled:
        with GlooWorkers(1, timeout=600, preload=["gt_trainer.testing"]) as workers:
            options = {"inductor_compilation": "regional"}
            folder = str(tmp_path / name)
            (found,) = workers.run(compiled, ONE_RANK, folder, str(tmp_path / "artifacts"), options)
        return found

    cold, warm = start("cold"), start("warm")
    assert not cold.trained.is_loaded
    assert warm.trained.is_loaded
    assert cold.misses > 0
    assert warm.misses == 0
    assert warm.hits > 0
    assert warm.trained.bits == cold.trained.bits
    assert "compile-regions" in warm.trained.passes
    (products,) = (tmp_path / "artifacts").glob("*/products")
    products.chmod(0o666)  # whoever may write there may run code here
    refused = start("refused")
    assert refused.misses > 0
    assert "is not used, since others may write to" in "".join(refused.trained.log)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "options", "num_ranks", "says"),
    [
        (LLAMA3, {}, 4, "1 group of ranks\n  ranks 0-3: captured by 0, compared with"),
        (
            replace(LLAMA3, parallelism={"data_parallel_shard_degree": 3}),
            {},
            3,
            (
                "2 groups of ranks\n  ranks 0-1: captured by 0, compared with rank 1\n"
                "  rank 2: captured by 2; apart because their tensors have other shapes"
            ),
        ),
        (SMALL, {"mode": "aot_joint"}, 2, "1 group of ranks\n  ranks 0-1: captured by 0, comp"),
        (
            replace(LLAMA3, num_layers=1),
            placed(0.025),
            4,
            "1 group of ranks\n  ranks 0-3: captured",
        ),
    ],
    ids=["tensor parallelism", "uneven shards", "aot_joint", "placed"],
)
def test_ranks_that_did_not_exist_when_their_graphs_were_stored_train_to_the_same_bits(
    case: Case, options: dict[str, Any], num_ranks: int, says: str, tmp_path: Path
):
    artifacts = tmp_path / "artifacts"
    report = precompiled(case, str(tmp_path / "nobody"), str(artifacts), num_ranks, options)
    assert str(report).startswith(says)
    assert (report.plan_file is None) == ("autoparallel" not in options)
    if report.plan_file is not None:
        solver = AutoParallelConfig(memory_budget_gib=0.025, plan=str(report.plan_file))
        options = {**options, "autoparallel_solver": solver}
    alone = run(case, tmp_path / "alone", None, options, num_ranks=num_ranks)
    warm = run(case, tmp_path / "warm", artifacts, options, num_ranks=num_ranks)
    assert all(each.is_loaded for each in warm)
    numbered = not {"mode", "autoparallel"} & options.keys()
    for a, b in zip(alone, warm, strict=True):
        assert a.bits == b.bits
        assert a.texts(numbered) == b.texts(numbered)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, placed(0.06)], ids=["by hand", "placed"])
def test_stages_of_ranks_that_did_not_exist_train_to_the_same_bits(
    options: dict[str, Any], tmp_path: Path
):
    artifacts = tmp_path / "artifacts"
    report = precompiled(ALIKE_STAGES, str(tmp_path / "nobody"), str(artifacts), 4, options)
    assert [(each.ranks, each.part) for each in report.groups] == [
        ((0, 1), "stage 0"),
        ((0, 1, 2, 3), "stages 1-2"),
        ((2, 3), "stage 3"),
    ]
    case = replace(ALIKE_STAGES, options=options)
    if report.plan_file is not None:
        solver = AutoParallelConfig(memory_budget_gib=0.06, plan=str(report.plan_file))
        case = replace(case, options={**options, "autoparallel_solver": solver})
    alone = run_stages(case, tmp_path / "alone", None)
    warm = run_stages(case, tmp_path / "warm", artifacts)
    assert all(each.is_loaded for each in warm)
    for a, b in zip(alone, warm, strict=True):
        assert a.bits == b.bits
        assert a.passes == b.passes
