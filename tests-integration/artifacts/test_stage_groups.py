"""Ranks that hold one stage of a pipeline share its graphs, and what differs among them is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from gt_trainer.models import deepseek_v3

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def rank_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of the benchmarks, which are on no path of their own; nor is its package this one."""
    import importlib
    import sys

    mine = {name: sys.modules.pop(name) for name in [*sys.modules] if _is_artifacts(name)}
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("artifacts.rank_groups")
    for name in [*sys.modules]:
        if _is_artifacts(name):
            del sys.modules[name]
    sys.modules.update(mine)


def _is_artifacts(name: str) -> bool:
    return name.partition(".")[0] == "artifacts"


def config_of_two_stages(folder: Path) -> deepseek_v3.GraphTrainer.Config:
    """A dense layer, then one of experts; expert parallelism over the four ranks of each stage."""
    config = deepseek_v3.deepseek_v3_debugmodel()
    del config.model_spec.model.layers[2:]
    config.parallelism = dataclasses.replace(
        config.parallelism,
        pipeline_parallel_degree=2,
        pipeline_parallel_first_stage_less_layers=0,
        pipeline_parallel_last_stage_less_layers=0,
        expert_parallel_degree=4,
    )
    config.training.seq_len, config.training.local_batch_size = 16, 2
    config.compile = dataclasses.replace(config.compile, artifacts=str(folder))
    return config


def test_the_four_ranks_of_a_stage_with_experts_are_one_group(
    rank_groups: ModuleType, tmp_path: Path
):
    found = rank_groups.groups_of_stages(config_of_two_stages(tmp_path), 8, [1])
    ((stage, (group,)),) = found.items()
    assert stage == "stage 1"
    assert (group.ranks, group.captured_by, group.part) == ((4, 5, 6, 7), (4, 7), "stage 1")


@pytest.mark.slow
def test_ranks_whose_shards_are_uneven_are_groups_of_their_own(
    rank_groups: ModuleType, tmp_path: Path
):
    config = config_of_two_stages(tmp_path)
    config.parallelism = dataclasses.replace(config.parallelism, expert_parallel_degree=1)
    found = rank_groups.groups_of_stages(config, 6)
    for first, groups in zip((0, 3), found.values(), strict=True):
        assert [each.ranks for each in groups] == [(first, first + 1), (first + 2,)]
        assert groups[1].reason == "their tensors have other shapes"
