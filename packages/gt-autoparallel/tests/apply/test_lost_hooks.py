"""A placed model does not call its modules: hooks inside it are refused, and not lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from random_plans import random_plan
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from gt_autoparallel.apply import apply_plan
from gt_autoparallel.apply.placed_forward import hooks_of_inner_modules
from gt_autoparallel.errors import PlacementError, PlanMismatchError
from gt_autoparallel.graph.capture import capture_placement_graph
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_trace.testing import fake_world


def new_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))


def ignored(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_world(rank=0, world_size=2):
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("data",))


@pytest.fixture(scope="module")
def plan(mesh: DeviceMesh) -> PlacementPlan:
    model = new_model()
    graph = capture_placement_graph(model, (torch.empty(4, 4),))
    fixed = {"input": (Shard(0),), "output": (Shard(0),)}
    return random_plan(model, graph, MeshShape.of(mesh), seed=1, fixed=fixed)


def test_names_every_hook_that_would_be_lost_or_run_twice(
    mesh: DeviceMesh, plan: PlacementPlan
) -> None:
    model = new_model()
    model[0].register_forward_pre_hook(ignored)
    model[0].register_full_backward_pre_hook(ignored)
    model[1].register_full_backward_hook(ignored)
    model[1][0].register_forward_hook(ignored)
    model.register_forward_hook(ignored)
    with pytest.raises(PlanMismatchError) as error:
        apply_plan(model, plan, mesh)
    assert str(error.value) == (
        "the plan does not fit:\n"
        "  the model itself has hooks (register_forward_hook), which ran while it was planned and "
        "would run once more around the plan; register them after it is placed\n"
        "  0 has hooks (register_forward_pre_hook, register_full_backward_pre_hook)\n"
        "  1 has hooks (register_full_backward_hook)\n"
        "  1.0 has hooks (register_forward_hook)\n"
        "  hooks inside do not run in a placed model: remove them, or say ignore_hooks=True if all "
        "that they do is in the plan"
    )


def test_refuses_to_run_with_hooks_that_came_later(mesh: DeviceMesh, plan: PlacementPlan) -> None:
    model = new_model()
    apply_plan(model, plan, mesh)
    handle = model[1][1].register_forward_hook(ignored)
    with pytest.raises(PlacementError) as error:
        model(torch.ones(2, 4))
    assert str(error.value) == (
        "modules inside the placed model are not called, so that these hooks would not run; remove "
        "them, and hook the model itself or its parameters:\n"
        "  1.1 has hooks (register_forward_hook)"
    )
    handle.remove()
    model(torch.ones(2, 4))


def test_hooks_of_the_placed_model_and_of_its_parameters_run(
    mesh: DeviceMesh, plan: PlacementPlan
) -> None:
    model = new_model()
    apply_plan(model, plan, mesh)
    seen: list[str] = []
    model.register_forward_pre_hook(lambda *_: seen.append("before"))
    model.register_forward_hook(lambda *_: seen.append("after"))
    model.register_full_backward_hook(lambda *_: seen.append("backward"))
    bias = model[0].bias
    bias.register_hook(lambda gradient: seen.append("gradient"))
    bias.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    model(torch.ones(2, 4)).sum().backward()
    assert seen[:2] == ["before", "after"]
    assert set(seen[2:]) == {"backward", "gradient", "accumulated"}
    assert len(seen) == 5


def test_hooks_inside_are_ignored_on_demand(mesh: DeviceMesh, plan: PlacementPlan) -> None:
    model = new_model()
    seen: list[int] = []
    model[0].register_forward_hook(lambda *_: seen.append(0))
    apply_plan(model, plan, mesh, ignore_hooks=True)
    model[1].register_forward_hook(lambda *_: seen.append(1))
    model(torch.ones(2, 4))
    assert seen == []


def test_modules_that_are_called_may_have_hooks() -> None:
    model = new_model()
    model[1][0].register_forward_hook(ignored)
    assert list(hooks_of_inner_modules(model, called={"1"})) == []
    assert list(hooks_of_inner_modules(model, called={"1.0"})) == []
    assert list(hooks_of_inner_modules(model, called={"1.1", "0"})) == [
        "1.0 has hooks (register_forward_hook)"
    ]
