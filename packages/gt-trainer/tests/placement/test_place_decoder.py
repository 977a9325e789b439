"""A plan is made and published on rank 0; whatever goes wrong there is said on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gt_autoparallel import ConstraintError, MeshShape, PlacementError, find_placement
from gt_trace.testing import fake_world
from gt_trainer.placement import place_decoder as placing


@pytest.mark.parametrize(
    ("failure", "sent", "message"),
    [
        (ConstraintError("no such axis"), ConstraintError, "no such axis"),
        (
            AssertionError("a value is a tensor"),
            PlacementError,
            "planning failed on rank 0: AssertionError: a value is a tensor",
        ),
    ],
)
def test_every_failure_of_rank_0_is_sent_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception,
    sent: type[PlacementError],
    message: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    received, raised = sent_and_raised(monkeypatch, fail, dump_folder="")
    assert str(raised) == message
    assert type(received) is sent
    assert str(received) == message


def test_a_dump_folder_that_cannot_be_written_to_is_said_to_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    no_folder = tmp_path / "file"
    no_folder.touch()
    mesh = MeshShape(names=("data",), sizes=(2,))
    plan = find_placement(torch.nn.Linear(2, 2), mesh, (torch.empty(2, 2),))
    received, raised = sent_and_raised(
        monkeypatch, lambda *_, **__: plan, dump_folder=str(no_folder)
    )
    assert str(raised) == str(received)
    assert str(received) == (
        f"planning failed on rank 0: FileExistsError: [Errno 17] File exists: '{no_folder}'"
    )


def sent_and_raised(
    monkeypatch: pytest.MonkeyPatch, placement_plan: object, *, dump_folder: str
) -> tuple[object, PlacementError]:
    """What rank 0 sends to the others, and raises, where planning is ``placement_plan``."""
    broadcasts: list[object] = []

    def broadcast(objects: list[object], **_: object) -> None:
        broadcasts.extend(objects)

    monkeypatch.setattr(placing, "planned_mesh", lambda dims: None)
    monkeypatch.setattr(placing, "expert_blocks", lambda model: {})
    monkeypatch.setattr(placing, "placement_plan", placement_plan)
    monkeypatch.setattr(placing.dist, "broadcast_object_list", broadcast)
    arguments: Any = {"parallel_dims": None, "training": None, "solver": None}
    with fake_world(rank=0, world_size=2), pytest.raises(PlacementError) as error:
        placing.place_decoder(torch.nn.Linear(2, 2), dump_folder=dump_folder, **arguments)  # type: ignore[arg-type]  # never looked at
    (received,) = broadcasts
    return received, error.value
