"""Which ranks of a run that nobody started seem alike, told without a capture."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

from gt_trainer.launcher import run_in_child
from gt_trainer.models import llama3
from gt_trainer.precompile.precompile import AlikeParts, alike_parts


def parts_of(folder: Path, *, world_size: int, **parallelism: Any) -> tuple[AlikeParts, ...]:
    config = llama3.llama3_debugmodel()
    config.parallelism = dataclasses.replace(config.parallelism, **parallelism)
    config.compile = dataclasses.replace(config.compile, artifacts=str(folder))
    config.training.seq_len, config.training.local_batch_size = 32, 4
    found: tuple[AlikeParts, ...] = run_in_child(
        partial(alike_parts, config, world_size), timeout_seconds=300
    )
    return found


def test_alike_stages_are_one_part_and_ranks_with_other_shapes_another(tmp_path: Path):
    found = parts_of(
        tmp_path,
        world_size=12,
        pipeline_parallel_degree=4,
        pipeline_parallel_schedule="1F1B",
        pipeline_parallel_microbatch_size=1,
        data_parallel_shard_degree=3,
    )
    assert [(each.name, each.alike.ranks, each.reason) for each in found] == [
        ("stage 0", (0, 1), ""),
        ("stage 0", (2,), "their tensors have other shapes"),
        ("stages 1-2", (3, 4, 6, 7), "they hold another stage"),
        ("stages 1-2", (5, 8), "their tensors have other shapes"),
        ("stage 3", (9, 10), "they hold another stage"),
        ("stage 3", (11,), "their tensors have other shapes"),
    ]
    assert found[2].stages == {3: 1, 4: 1, 6: 2, 7: 2}
    assert found[2].alike.coordinates[7]["pp"] == 2


def test_a_whole_step_is_a_part_without_a_name(tmp_path: Path):
    (found,) = parts_of(tmp_path, world_size=4, tensor_parallel_degree=2)
    assert (found.name, found.alike.ranks, found.reason) == ("", (0, 1, 2, 3), "")
    assert found.stages == {}
    assert found.alike.coordinates[2] == {"fsdp": 1, "tp": 0}
