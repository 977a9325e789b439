"""Placed models on one rank of a fake world: what they hold, trace to, refuse."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Iterator
from typing import Any

import placed_flex_attention
import pytest
import torch
from placed_model_cases import (
    batch,
    decoder,
    local_arguments,
    mesh_2d,
    step_of,
    trace,
    unpredicted_collectives,
)
from random_plans import random_plan
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from gt_autoparallel.apply import apply_plan, placed_model
from gt_autoparallel.apply.local_program import execution_order
from gt_autoparallel.errors import PlacementError, PlacementInputError, PlanMismatchError
from gt_autoparallel.graph.capture import capture_placement_graph
from gt_autoparallel.graph.layouts import MeshShape, short_text
from gt_autoparallel.graph.placement_graph import PlacementGraph
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_config.node_keys import FsdpCollectiveAnnotation
from gt_passes.analysis.collectives import is_collective
from gt_trace import module_fqn, phase_of, read_annotation, trace_step
from gt_trace.testing import fake_world


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_world(rank=3, world_size=4):
        yield mesh_2d()


@pytest.fixture(scope="module")
def graph() -> PlacementGraph:
    tokens, positions = batch()
    return capture_placement_graph(decoder(), (tokens,), {"positions": positions})


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)])

    def forward(self, x: torch.Tensor, flag: bool = True) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


FSDP = {
    **{name: (Shard(0), Replicate()) for name in ("layers.0.weight", "layers.1.weight")},
    "x": (Shard(0), Replicate()),
    "output": (Shard(0), Replicate()),
}


def fsdp_plan(mesh: DeviceMesh) -> tuple[Layers, PlacementPlan]:
    """Every operator on its own rows; found by trying random plans with layouts of FSDP."""
    model = Layers()
    captured = capture_placement_graph(model, (torch.empty(4, 8),), {"flag": True})
    return model, random_plan(model, captured, MeshShape.of(mesh), seed=1, fixed=FSDP)


def test_parameters_become_dtensors_with_their_values_and_ties(
    mesh: DeviceMesh, graph: PlacementGraph
) -> None:
    model = decoder()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    plan = random_plan(model, graph, MeshShape.of(mesh), seed=2)
    assert apply_plan(model, plan, mesh) is model
    layouts = plan.parameter_layouts()
    assert model.head.weight is model.embedding.weight
    assert set(dict(model.named_parameters())) == set(before)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.placements == layouts[name]
        wanted = before[name]
        for axis, placement in enumerate(layouts[name]):
            if isinstance(placement, Shard):
                wanted = wanted.chunk(2, dim=placement.dim)[coordinate[axis]]
        assert torch.equal(parameter.to_local(), wanted)


def test_a_model_on_meta_stays_there(mesh: DeviceMesh, graph: PlacementGraph) -> None:
    model = decoder().to("meta")
    model.head.weight = model.embedding.weight  # the move to meta made two of it
    apply_plan(model, random_plan(model, graph, MeshShape.of(mesh), seed=2), mesh)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert isinstance(model.head.weight, DTensor)


def test_nodes_say_where_they_belong_and_what_fsdp_does(mesh: DeviceMesh) -> None:
    model, plan = fsdp_plan(mesh)
    apply_plan(model, plan, mesh)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(model(x, flag=True).sum(), list(model.parameters()))

    traced = trace_step(step, module=model)(torch.empty(2, 8))
    products = [n for n in traced.graph_module.graph.nodes if n.target is torch.ops.aten.mm.default]
    found = [(module_fqn(node), phase_of(node)) for node in products]
    assert found[:2] == [("layers.0", "forward"), ("layers.1", "forward")]
    assert set(found[2:]) == {("layers.1", "backward"), ("layers.0", "backward")}
    of_parameters = [
        (annotation.kind, annotation.parameter_names, annotation.mesh_axis)
        for node in traced.graph_module.graph.nodes
        if is_collective(node)
        and (annotation := read_annotation(node, FsdpCollectiveAnnotation)) is not None
    ]
    assert ("unshard", ("layers.0.weight",), "data") in of_parameters
    assert {kind for kind, _, _ in of_parameters} <= {"unshard", "reduce_grad"}


def test_parameters_are_gathered_late_and_gradients_reduced_at_once(graph: PlacementGraph) -> None:
    order = execution_order(graph)
    assert sorted(order) == list(range(len(graph.nodes)))
    place = {index: position for position, index in enumerate(order)}
    for use in graph.uses:
        assert place[use.value.node] < place[use.consumer]
    names = [graph.nodes[index].name for index in order]
    first_product = next(i for i, name in enumerate(names) if name.endswith("/mm"))
    shared = [i for i, name in enumerate(names) if name.startswith("layers.0.down.weight/")]
    assert min(shared) > first_product
    gradients = [i for i, index in enumerate(order) if graph.nodes[index].kind == "gradient"]
    assert gradients != list(range(len(order) - len(gradients), len(order)))


# ---- refusals ----------------------------------------------------------------------------------


def test_refuses_what_does_not_fit_all_at_once_and_changes_nothing(
    mesh: DeviceMesh, graph: PlacementGraph
) -> None:
    plan = random_plan(decoder(), graph, MeshShape.of(mesh), seed=0)
    model = decoder()
    model.norm = nn.RMSNorm(4)
    model.layers[0].down.weight.requires_grad_(False)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    with pytest.raises(PlanMismatchError) as caught:
        apply_plan(model, plan, other)
    assert str(caught.value) == (
        "the plan does not fit:\n"
        "  layers.0.down.weight is frozen float32[16, 32], planned for float32[16, 32]\n"
        "  norm.weight is float32[4], planned for float32[16]\n"
        "  head.weight was tied to embedding.weight when the model was planned, and is not; tie it\n"
        "  the plan is for a mesh {'data': 2, 'model': 2}, and this one is {'data': 4}; plan again "
        "for it"
    )
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_refuses_a_placed_model(mesh: DeviceMesh, graph: PlacementGraph) -> None:
    model = decoder()
    plan = random_plan(model, graph, MeshShape.of(mesh), seed=0)
    apply_plan(model, plan, mesh)
    with pytest.raises(PlanMismatchError, match="the model is placed already"):
        apply_plan(model, plan, mesh)


def test_a_stage_knows_the_groups_in_which_experts_of_any_stage_exchange(mesh: DeviceMesh) -> None:
    """In one order: each rank then makes as many groups of them."""
    model, plan = fsdp_plan(mesh)
    of_stages = {(1,): mesh["model"], (0,): mesh["data"]}
    apply_plan(model, plan, mesh, expert_meshes=of_stages)
    placed = placed_model(model)
    assert placed is not None
    assert list(placed.expert_meshes.items()) == [
        (("data",), mesh["data"]),
        (("model",), mesh["model"]),
    ]


def test_refuses_inputs_that_were_not_planned(mesh: DeviceMesh) -> None:
    model, plan = fsdp_plan(mesh)
    apply_plan(model, plan, mesh)
    with pytest.raises(PlacementInputError) as caught:
        model(torch.empty(4, 8), flag=False)
    assert str(caught.value) == (
        "inputs of the placed model:\n"
        "  x has shape (4, 8) and dtype torch.float32; allowed: (2, 8), this rank's shard of "
        "(4, 8) placed as S(0) R, and torch.float32\n"
        "  flag is False; it was planned as the constant True"
    )
    with pytest.raises(PlacementInputError, match="call the model as in the example inputs"):
        model(torch.empty(2, 8))


def test_refuses_to_run_in_another_mode_than_planned(mesh: DeviceMesh) -> None:
    model, plan = fsdp_plan(mesh)
    apply_plan(model, plan, mesh)
    model.layers[1].eval()
    with pytest.raises(
        PlacementError, match=r"layers\.1 is not in training mode, in which it was planned"
    ):
        model(torch.empty(2, 8), flag=True)


def test_runs_without_gradients(mesh: DeviceMesh) -> None:
    model, plan = fsdp_plan(mesh)
    apply_plan(model, plan, mesh)
    with torch.no_grad():
        assert not model(torch.ones(2, 8), flag=True).requires_grad


class RecordedOperators(TorchDispatchMode):
    """The operators that run inside, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_eager_execution_runs_the_operators_of_the_trace(
    recomputes: bool, mesh: DeviceMesh, graph: PlacementGraph
) -> None:
    model = decoder()
    plan = random_plan(model, graph, MeshShape.of(mesh), seed=7, recomputes=recomputes)
    assert bool(plan.recomputed) is recomputes
    apply_plan(model, plan, mesh)
    traced = trace(model, plan, mesh)
    assert unpredicted_collectives(traced, plan, mesh) == []
    arguments = local_arguments(plan, mesh)
    with RecordedOperators() as ran:
        step_of(model)(*arguments)
    calls = [node.target for node in traced.nodes if node.op == "call_function"]
    assert ran.found == [str(call) for call in calls if call is not operator.getitem]


# ---- models that are not as planned ------------------------------------------------------------


class Gated(nn.Module):
    """A parameter that nothing reads, one without gradient, one frozen, a layer that has modes."""

    def __init__(self, activation: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.act = activation()
        self.drop = nn.Dropout(0.5)
        self.unused = nn.Parameter(torch.ones(8))
        self.detached = nn.Parameter(torch.ones(8))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.drop(self.act(self.up(x))) * self.detached.detach() * self.frozen
        return x if mask is None else x * mask


@pytest.fixture(scope="module")
def gated_plan(mesh: DeviceMesh) -> PlacementPlan:
    model = Gated().eval()
    captured = capture_placement_graph(model, (torch.empty(4, 8), None))
    fixed = {"x": (Shard(0), Replicate()), "output": (Shard(0), Replicate())}
    return random_plan(model, captured, MeshShape.of(mesh), seed=1, fixed=fixed)


def gated(plan: PlacementPlan, mesh: DeviceMesh) -> Gated:
    torch.manual_seed(0)
    model = Gated().eval()
    apply_plan(model, plan, mesh)
    return model


def test_parameters_without_gradients_are_no_difference(
    mesh: DeviceMesh, gated_plan: PlacementPlan
) -> None:
    model = gated(gated_plan, mesh)
    model(torch.ones(2, 8), None).sum().backward()
    assert model.up.bias.grad is not None
    assert model.unused.grad is None
    assert model.detached.grad is None


def test_refuses_other_modes_classes_and_frozen_parameters_than_planned(
    mesh: DeviceMesh, gated_plan: PlacementPlan
) -> None:
    model = Gated(nn.ReLU).eval()
    model.drop.train()
    model.frozen.requires_grad_(True)
    model.up.weight.register_hook(torch.neg)
    with pytest.raises(PlanMismatchError) as caught:
        apply_plan(model, gated_plan, mesh)
    assert str(caught.value) == (
        "the plan does not fit:\n"
        "  frozen is float32[8], planned for frozen float32[8]\n"
        "  act is ReLU in evaluation mode, planned for GELU in evaluation mode\n"
        "  drop is Dropout, planned for Dropout in evaluation mode\n"
        "  up.weight has gradient hooks, which the DTensor in its place would not have; "
        "register them after the model is placed"
    )


def test_refuses_to_run_on_parameters_that_are_no_longer_as_planned(
    mesh: DeviceMesh, gated_plan: PlacementPlan
) -> None:
    model = gated(gated_plan, mesh)
    model.frozen.requires_grad_(True)
    model.up.to(torch.float64)
    with pytest.raises(PlacementError) as caught:
        model(torch.ones(2, 8), None)
    layout = short_text(gated_plan.parameter_layouts()["up.bias"])
    message = str(caught.value)
    assert (
        f"  up.bias is torch.float64 placed as {layout} of (8,), and was planned as torch.float32 "
        f"placed as {layout} of (8,)" in message
    )
    assert (
        "  frozen was frozen when the model was planned, and would get no gradient; freeze it, or "
        "plan again" in message
    )


def test_refuses_inputs_whose_gradient_or_kind_was_not_planned(
    mesh: DeviceMesh, gated_plan: PlacementPlan
) -> None:
    model = gated(gated_plan, mesh)
    with pytest.raises(PlacementInputError) as caught:
        model(torch.ones(2, 8, requires_grad=True), torch.ones(2, 8))
    assert str(caught.value) == (
        "inputs of the placed model:\n"
        "  x requires grad, and was planned without a gradient: detach it, or plan with an example "
        "input that requires grad\n"
        "  mask is a tensor; it was planned as the constant None"
    )


def test_refuses_autocast_and_second_derivatives(
    mesh: DeviceMesh, gated_plan: PlacementPlan
) -> None:
    model = gated(gated_plan, mesh)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PlacementError) as caught:
        model(torch.ones(2, 8), None)
    assert str(caught.value) == (
        "autocast is on for cpu, and a placed model computes in the dtypes of its plan: leave "
        "autocast out, and plan with compute_dtype="
    )
    loss = model(torch.ones(2, 8), None).square().sum()
    with pytest.raises(PlacementError, match="leave create_graph out"):
        torch.autograd.grad(loss, [model.up.weight], create_graph=True)


def test_a_copy_computes_with_its_own_parameters(
    mesh: DeviceMesh, gated_plan: PlacementPlan
) -> None:
    model = gated(gated_plan, mesh)
    x = torch.randn(2, 8)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x, None), model(x, None))
    with torch.no_grad():
        for parameter in copied.up.parameters():
            parameter.zero_()
    assert not copied(x, None).any()
    assert model(x, None).any()
    with pytest.raises(PlacementError, match=r"cannot be pickled.*save its state_dict\(\)"):
        pickle.dumps(model)


def test_attributes_of_parameters_stay(mesh: DeviceMesh, gated_plan: PlacementPlan) -> None:
    model = Gated().eval()
    model.up.bias.no_weight_decay = True  # type: ignore[attr-defined]  # as users do
    apply_plan(model, gated_plan, mesh)
    assert model.up.bias.no_weight_decay is True  # type: ignore[attr-defined]  # as above


def test_a_mask_of_another_kind_is_told_place_by_place(mesh: DeviceMesh) -> None:
    attention = placed_flex_attention.model()
    inputs = placed_flex_attention.batch(0)
    captured = capture_placement_graph(attention, inputs)
    plan = random_plan(attention, captured, MeshShape.of(mesh), seed=0)
    apply_plan(attention, plan, mesh)
    x, mask = placed_flex_attention.local(plan, mesh, inputs)
    with pytest.raises(PlacementInputError) as caught:
        attention(x, create_block_mask(causal, None, None, 8, 8, device="cpu", BLOCK_SIZE=4))
    assert str(caught.value) == (
        "arguments have another structure than the planned ones; call the model as in the example "
        "inputs:\n"
        "  mask: BlockMask with mask_mod causal, captured with _mask_of.<locals>.within"
    )
    mask.kv_num_blocks = mask.kv_num_blocks.repeat_interleave(2, 0)
    with pytest.raises(PlacementInputError, match=r"mask\.kv_num_blocks has shape \("):
        attention(x, mask)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k
