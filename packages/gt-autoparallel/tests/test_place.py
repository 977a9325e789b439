"""One rank plans for all; whatever goes wrong there is said on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from plan_doubles import FSDP, plan_by_hand
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from gt_autoparallel import (
    ConstraintError,
    PlacementError,
    makes_plans,
    place,
    plan_on_first_rank,
)
from gt_autoparallel.errors import PlacementInputError
from gt_trace.testing import fake_world


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
    broadcasts: list[object] = []
    monkeypatch.setattr(
        dist, "broadcast_object_list", lambda objects, **_: broadcasts.extend(objects)
    )

    def fail() -> Any:
        raise failure

    with fake_world(rank=0, world_size=2), pytest.raises(PlacementError) as error:
        plan_on_first_rank(fail, device="cpu")
    (received,) = broadcasts
    assert type(received) is sent
    assert str(error.value) == str(received) == message


def test_a_fake_rank_to_which_nobody_sends_plans_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "broadcast_object_list", lambda *_, **__: pytest.fail("sent"))
    plan = plan_by_hand(("dp", 2, FSDP))
    with fake_world(rank=1, world_size=2):
        assert makes_plans()
        assert plan_on_first_rank(lambda: plan, device="cpu").plan is plan


def test_names_every_argument_that_is_not_what_it_must_be() -> None:
    wrong: Any = "model"
    with pytest.raises(PlacementInputError) as error:
        place(wrong, wrong, (), wrong)
    assert str(error.value) == (
        "arguments of place:\n"
        "  model is a str; allowed: a torch.nn.Module\n"
        "  mesh is a str; allowed: a DeviceMesh with named axes\n"
        "  request is a str; allowed: a PlacementRequest(memory_budget_bytes=..., ...), or None"
    )


def test_refuses_a_mesh_of_some_ranks_and_axes_of_one() -> None:
    linear, inputs = nn.Linear(4, 4), (torch.empty(4, 4),)
    with fake_world(rank=0, world_size=4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        with pytest.raises(PlacementInputError) as error:
            place(linear, mesh["data"], inputs)
        assert str(error.value) == (
            "arguments of place:\n"
            "  mesh has 2 of the 4 ranks; allowed: a mesh of all ranks, which get one plan; for a "
            "part of them use find_placement and apply_plan"
        )
        mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("data", "model"))
        with pytest.raises(PlacementInputError) as error:
            place(linear, mesh, inputs)
        assert str(error.value) == (
            "mesh: axis 'model' has 1 rank: there is nothing to shard along it, leave it out"
        )
    assert type(linear.weight) is nn.Parameter


def test_without_a_request_batches_are_cut_over_the_first_axis() -> None:
    linear, inputs = nn.Linear(4, 4), (torch.empty(4, 4),)
    with fake_world(rank=0, world_size=4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        plan = place(linear, mesh, inputs)
        assert linear(torch.ones(2, 4)).shape == (2, 4)
    of_kind = {
        node.kind: plan.options[node.index]
        for node in plan.graph.nodes
        if node.kind in ("input", "output")
    }
    cut = "(Shard(dim=0), Replicate())"
    assert str(of_kind["input"].outputs[0]) == str(of_kind["output"].operands[0]) == cut
    assert set(plan.parameter_layouts()) == {"weight", "bias"}
