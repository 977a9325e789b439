"""A plan is made on rank 0; whatever goes wrong there is said on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gt_autoparallel import ConstraintError, PlacementError
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
    broadcasts: list[Any] = []

    def fail(*_: object, **__: object) -> None:
        raise failure

    def broadcast(objects: list[Any], **_: object) -> None:
        broadcasts.extend(objects)

    monkeypatch.setattr(placing, "planned_mesh", lambda dims: None)
    monkeypatch.setattr(placing, "expert_blocks", lambda model: {})
    monkeypatch.setattr(placing, "placement_plan", fail)
    monkeypatch.setattr(placing.dist, "broadcast_object_list", broadcast)
    arguments: Any = {"parallel_dims": None, "training": None, "solver": None}
    with fake_world(rank=0, world_size=2), pytest.raises(PlacementError) as error:
        placing.place_decoder(torch.nn.Linear(2, 2), dump_folder="", **arguments)  # type: ignore[arg-type]  # never looked at
    assert str(error.value) == message
    (received,) = broadcasts
    assert type(received) is sent
    assert str(received) == message
