"""What is no model, mesh or request is refused in words, all of it at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from global_run import run_globally
from planned_models import MESH, example, model, planner
from torch import nn
from torch.distributed.tensor import Partial, Shard

from gt_autoparallel.errors import ConstraintError, PlacementInputError, UnsupportedModelError
from gt_autoparallel.find import PlacementRequest, find_placement
from gt_autoparallel.graph.capture import capture_placement_graph
from gt_autoparallel.problem.constraints import Constraints, ModuleOutput


def refused(**arguments: Any) -> str:
    given = {"model": model(), "mesh": MESH, "example_inputs": example()}
    given |= {name: arguments.pop(name) for name in [*given, "example_kwargs"] if name in arguments}
    with pytest.raises(PlacementInputError) as error:
        find_placement(**given, request=PlacementRequest(**arguments))
    return str(error.value)


def test_names_every_argument_that_is_not_what_it_must_be() -> None:
    message = refused(
        model=None,
        mesh=(2, 2),
        example_inputs=torch.empty(3),
        example_kwargs=3,
        cost_model="h100",
        optimizer_state_copies=-1,
        loss_bytes=-1,
        compute_dtype="bf16",
        reduce_dtype=torch.int8,
        experts={"moe": object()},
        replicate_unknown="aten.foo",
        device="nope",
        progress=3,
    )
    assert message == (
        "arguments of find_placement:\n"
        "  model is None; allowed: a torch.nn.Module\n"
        "  mesh is (2, 2); allowed: a DeviceMesh with named axes, or a MeshShape\n"
        "  example_inputs is a Tensor; allowed: a tuple of the forward's positional arguments, as "
        "in (tokens,)\n"
        "  example_kwargs is an int; allowed: a mapping of the forward's keyword arguments, or None\n"
        "  cost_model is a str; allowed: a gt_passes.simulation.CostModel, or None for H100s\n"
        "  optimizer_state_copies is -1; allowed: a number of at least 0\n"
        "  loss_bytes is -1; allowed: an integer of at least 0\n"
        "  compute_dtype is 'bf16'; allowed: a floating-point torch.dtype, or None\n"
        "  reduce_dtype is torch.int8; allowed: a floating-point torch.dtype, or None\n"
        "  experts['moe'], of type object, lacks module, weight_names, hidden_dims, run; allowed: an ExpertBlock\n"
        "  replicate_unknown is 'aten.foo'; allowed: a collection of names, as in "
        '{"mylib.gate.default"}\n'
        "  device is 'nope'; allowed: a torch.device or its name, as 'cuda'\n"
        "  progress is 3; allowed: a function that takes a line of text, or None"
    )


def test_names_every_part_of_a_request_that_is_not_what_it_must_be() -> None:
    wrong: dict[str, Any] = {
        "constraints": {"x": [Shard(0)]},
        "memory_budget_bytes": 1.5,
        "relative_gap": float("nan"),
        "time_limit_seconds": 0,
        "below_us": -1.0,
    }
    with pytest.raises(PlacementInputError) as error:
        planner().find(**wrong)
    assert str(error.value) == (
        "arguments of Planner.find:\n"
        "  constraints is a dict; allowed: Constraints(inputs=..., outputs=..., parameters=..., "
        "nodes=..., experts=..., expert_tokens=...)\n"
        "  memory_budget_bytes is 1.5; allowed: an integer of at least 0, or None for no limit\n"
        "  relative_gap is nan; allowed: a number of at least 0\n"
        "  time_limit_seconds is 0; allowed: a positive number\n"
        "  below_us is -1.0; allowed: a number of at least 0"
    )


def test_names_every_constraint_that_is_no_layout() -> None:
    wrong: Any = Constraints(
        inputs={"x": Shard(0)},
        outputs={"output": "S(0)"},
        parameters={"layers.0.*": [Shard(-1)], "layers.1.*": ModuleOutput(layout=[Shard(0)])},
        nodes={"layers.0": ModuleOutput(layout=[Partial()], phase="sideways")},  # type: ignore[arg-type]  # what is refused
    )
    with pytest.raises(ConstraintError) as error:
        planner().find(constraints=wrong)
    a_list = "allowed: a list with a placement or None for each of the mesh axes ['dp'], or a "
    assert str(error.value) == (
        "constraints:\n"
        f"  inputs['x']: Shard(dim=0); {a_list}mapping from them to placements\n"
        f"  outputs['output']: 'S(0)'; {a_list}mapping from them to placements\n"
        "  parameters['layers.0.*']: [Shard(dim=-1)]; allowed: dims that are counted from the "
        "first one, 0\n"
        "  parameters['layers.1.*']: ModuleOutput(layout=[Shard(dim=0)], phase='forward'); "
        f"{a_list}mapping from them to placements; phases are for nodes\n"
        "  nodes['layers.0']: phase is 'sideways'; allowed: ('forward', 'backward')"
    )


def test_names_constraints_that_are_no_mappings() -> None:
    wrong: Any = Constraints(inputs=None, nodes={3: [Shard(0)]})  # type: ignore[arg-type,dict-item]  # what is refused
    with pytest.raises(ConstraintError) as error:
        planner().find(constraints=wrong)
    assert str(error.value) == (
        "constraints:\n"
        "  inputs is a NoneType; allowed: a mapping from names to layouts\n"
        "  nodes has the key 3; allowed: names, as strings"
    )


def test_a_layout_of_a_module_is_that_of_its_forward_unless_said_otherwise() -> None:
    plain, forward, backward = (
        planner().find(constraints=Constraints(nodes={"layers.1": wanted})).request.constraints
        for wanted in (
            [Shard(0)],
            ModuleOutput(layout=[Shard(0)], phase="forward"),
            ModuleOutput(layout=[Shard(0)], phase="backward"),
        )
    )
    assert plain == forward
    phases = {node.name: node.phase for node in planner().graph.nodes}
    assert {phases[each.node] for each in plain} == {"forward"}
    assert {phases[each.node] for each in backward} == {"backward"}


# ---- where and how a model is planned ------------------------------------------------------------


def test_gradients_are_planned_inside_no_grad_too() -> None:
    linear, x = nn.Linear(4, 4), torch.ones(2, 4)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            graph = capture_placement_graph(linear, (x,))
        assert len(graph.of_kind("gradient")) == 2
    given = {"input": x, "weight": linear.weight, "bias": linear.bias, "output/tangent": x}
    assert torch.equal(run_globally(graph, given).gradients["bias"], torch.full((4,), 2.0))


def test_refuses_to_plan_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedModelError) as error:
        capture_placement_graph(nn.Linear(4, 4), (torch.ones(2, 4),))
    assert str(error.value) == (
        "autocast is on for cpu, and a plan states every dtype: leave autocast out, and give "
        "compute_dtype="
    )


class EmptyList(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.tensor([]).reshape(0, 4)])


def test_refuses_an_empty_tensor_from_a_list() -> None:
    with pytest.raises(UnsupportedModelError, match="an empty tensor that the forward makes"):
        capture_placement_graph(EmptyList(), (torch.ones(2, 4),))
