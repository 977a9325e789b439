"""A plan is made and published on rank 0; what goes wrong there is said on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gt_autoparallel import MeshShape, PlacementError, find_placement
from gt_config import AutoParallelConfig
from gt_trace.testing import fake_world
from gt_trainer.placement import place_decoder as placing


def test_a_dump_folder_that_cannot_be_written_to_is_said_to_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    no_folder = tmp_path / "file"
    no_folder.touch()
    mesh = MeshShape(names=("data",), sizes=(2,))
    plan = find_placement(torch.nn.Linear(2, 2), mesh, (torch.empty(2, 2),))
    broadcasts: list[object] = []
    monkeypatch.setattr(placing, "planned_mesh", lambda dims: mesh)
    monkeypatch.setattr(placing.MeshShape, "of", lambda mesh: mesh)
    monkeypatch.setattr(placing, "expert_blocks", lambda model: {})
    monkeypatch.setattr(placing, "placement_plan", lambda *_, **__: plan)
    monkeypatch.setattr(
        dist, "broadcast_object_list", lambda objects, **_: broadcasts.extend(objects)
    )
    arguments: Any = {"parallel_dims": None, "training": None, "solver": AutoParallelConfig()}
    with fake_world(rank=0, world_size=2), pytest.raises(PlacementError) as error:
        placing.place_decoder(torch.nn.Linear(2, 2), dump_folder=str(no_folder), **arguments)  # type: ignore[arg-type]  # never looked at
    (received,) = broadcasts
    assert str(error.value) == str(received)
    assert str(received) == (
        f"planning failed on rank 0: FileExistsError: [Errno 17] File exists: '{no_folder}'"
    )
