"""Ranks that hold one stage of a pipeline share its graphs, and what differs among them is told."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gt_trainer.models import deepseek_v3

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

_PROGRAM = """
import dataclasses, json, sys
from pathlib import Path
from artifacts.rank_groups import groups_of_stages
from test_stage_groups import config_of_two_stages
folder, experts, world_size, stages = sys.argv[1:]
config = config_of_two_stages(Path(folder), expert_parallel_degree=int(experts))
found = groups_of_stages(config, int(world_size), json.loads(stages))
print(json.dumps({
    stage: [[each.ranks, each.captured_by, each.part, each.reason] for each in groups]
    for stage, groups in found.items()
}))
"""


def groups_of_stages(
    folder: Path, *, expert_parallel_degree: int, world_size: int, stages: list[int] | None = None
) -> dict[str, Any]:
    """What the benchmark finds, by stage: ranks, who captured, part and reason of each group.

    In a process of its own: it forks, which none may that has run a backward.
    """
    path = os.pathsep.join(
        [str(BENCHMARKS), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    ran = subprocess.run(
        [
            sys.executable, "-c", _PROGRAM, str(folder), str(expert_parallel_degree),
            str(world_size), json.dumps(stages),
        ],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found


def config_of_two_stages(
    folder: Path, *, expert_parallel_degree: int
) -> deepseek_v3.GraphTrainer.Config:
    """A dense layer, then one of experts."""
    config = deepseek_v3.deepseek_v3_debugmodel()
    del config.model_spec.model.layers[2:]
    config.parallelism = dataclasses.replace(
        config.parallelism,
        pipeline_parallel_degree=2,
        pipeline_parallel_first_stage_less_layers=0,
        pipeline_parallel_last_stage_less_layers=0,
        expert_parallel_degree=expert_parallel_degree,
    )
    config.training.seq_len, config.training.local_batch_size = 16, 2
    config.compile = dataclasses.replace(config.compile, artifacts=str(folder))
    return config


def test_the_four_ranks_of_a_stage_with_experts_are_one_group(tmp_path: Path):
    found = groups_of_stages(tmp_path, expert_parallel_degree=4, world_size=8, stages=[1])
    ((stage, (group,)),) = found.items()
    assert stage == "stage 1"
    assert group[:3] == [[4, 5, 6, 7], [4, 7], "stage 1"]


@pytest.mark.slow
def test_ranks_whose_shards_are_uneven_are_groups_of_their_own(tmp_path: Path):
    found = groups_of_stages(tmp_path, expert_parallel_degree=1, world_size=6)
    for first, groups in zip((0, 3), found.values(), strict=True):
        assert [each[0] for each in groups] == [[first, first + 1], [first + 2]]
        assert groups[1][3] == "their tensors have other shapes"
