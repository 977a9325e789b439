"""A placed model evaluates by the planned forward, if evaluation computes that and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from random_plans import random_plan
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from gt_autoparallel.apply import apply_plan
from gt_autoparallel.apply.evaluation import allow_evaluation
from gt_autoparallel.errors import PlacementError, PlacementInputError, PlanMismatchError
from gt_autoparallel.graph.capture import capture_placement_graph
from gt_autoparallel.graph.layouts import MeshShape
from gt_trace.testing import fake_world


class Doubled(nn.Module):
    """Doubles its input: always, or in training only."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.always = always

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.always or self.training else x * 1


def new_model(*, always: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Doubled(always=always))


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_world(rank=0, world_size=2):
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("data",))


@pytest.fixture
def placed(mesh: DeviceMesh) -> nn.Sequential:
    model = new_model()
    place(model, mesh)
    return model


def place(model: nn.Module, mesh: DeviceMesh) -> None:
    graph = capture_placement_graph(model, (torch.empty(4, 4),))
    names = [node.name for node in graph.of_kind("parameter")]
    fixed = {"input": (Shard(0),), "output": (Shard(0),)} | {n: (Shard(0),) for n in names}
    apply_plan(model, random_plan(model, graph, MeshShape.of(mesh), seed=1, fixed=fixed), mesh)


def test_runs_in_evaluation_mode_if_that_is_what_was_planned(placed: nn.Sequential) -> None:
    x = torch.ones(2, 4)
    trained = placed(x)
    placed.eval()
    with pytest.raises(PlacementError) as error:
        placed(x)
    assert str(error.value) == (
        "the model is not in training mode, in which it was planned: a placed model runs the graph "
        "of that mode only; call train(), or allow_evaluation(), which sees whether eval() changes "
        "nothing"
    )
    whole = new_model().to("meta")
    allow_evaluation(placed, whole, (torch.empty(4, 4),))
    assert all(module.training for module in whole.modules())
    with torch.no_grad():
        assert torch.equal(placed(x), trained)
    placed[1].train()
    with pytest.raises(PlacementError, match="the model is not in training mode"):
        placed(x)
    placed.train()
    assert torch.equal(placed(x), trained)


def test_says_where_evaluation_computes_something_else(placed: nn.Sequential) -> None:
    with pytest.raises(PlanMismatchError) as error:
        allow_evaluation(placed, new_model(always=False), (torch.empty(4, 4),))
    assert str(error.value) == (
        "in evaluation mode, with these inputs and dtypes, the model computes something else than "
        "was planned, and a placed model runs what was planned:\n"
        "  node '1/mul': args is [{'value': [7, 0]}, 1], planned for [{'value': [7, 0]}, 2]\n"
        "  node '1/grad/mul': args is [{'value': [9, 0]}, 1], planned for [{'value': [9, 0]}, 2]"
    )
    placed.eval()
    with pytest.raises(PlacementError, match="not in training mode"):
        placed(torch.ones(2, 4))


class Returns(nn.Module):
    """Computes the same in both modes, and returns it beside something that no graph holds."""

    def __init__(self, training: Any, evaluation: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.beside = {True: training, False: evaluation}

    def forward(self, x: torch.Tensor) -> Any:
        return {"y": self.linear(x), "beside": self.beside[self.training]}


@pytest.mark.parametrize(
    ("training", "evaluation", "difference"),
    [
        (1.0, 2.0, "output['beside']: constant is 2.0, planned for 1.0"),
        (1, 1.0, "output['beside']: constant is 1.0, planned for 1"),
        ((1, 2), [1, 2], "results have the structure "),
        ((), (None,), "results have the structure "),
    ],
)
def test_says_where_evaluation_returns_something_else(
    mesh: DeviceMesh, training: object, evaluation: object, difference: str
) -> None:
    model = Returns(training, evaluation)
    place(model, mesh)
    with pytest.raises(PlanMismatchError) as error:
        allow_evaluation(model, Returns(training, evaluation), (torch.empty(4, 4),))
    assert str(error.value).partition("\n  ")[2].startswith(difference)
    allow_evaluation(model, Returns(training, training), (torch.empty(4, 4),))
    assert model.eval()(torch.ones(2, 4))["beside"] == training


def test_refuses_the_placed_model_as_the_one_that_is_not(placed: nn.Sequential) -> None:
    with pytest.raises(PlacementInputError) as error:
        allow_evaluation(placed, placed, (torch.empty(4, 4),))
    assert str(error.value) == (
        "arguments of allow_evaluation:\n  whole is placed; allowed: the same model, not placed"
    )


def test_names_every_argument_that_is_not_what_it_must_be() -> None:
    with pytest.raises(PlacementInputError) as error:
        allow_evaluation(new_model(), None, (), experts=3)  # type: ignore[arg-type]  # what is refused
    assert str(error.value) == (
        "arguments of allow_evaluation:\n"
        "  placed is no placed model; allowed: one that apply_plan placed\n"
        "  whole is None; allowed: the same torch.nn.Module, not placed\n"
        "  experts is an int; allowed: a mapping from names of modules to expert blocks, or None"
    )
