"""What the audit lets come and go in the turns of layers, on graphs that need a closer look."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from plan_doubles import S0, R
from planned_models import MESH, Stack
from random_graphs import GraphWriter, spec
from torch import nn

from gt_autoparallel.audit.memory_checks import recounted_memory, saved_bytes, work_of_layers
from gt_autoparallel.audit.plan_audit import audit_plan
from gt_autoparallel.find import planner_of_model
from gt_autoparallel.graph.graph_encoding import graph_digest
from gt_autoparallel.graph.layer_turns import layer_turns, read_late
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.parameter_chains import is_view_like
from gt_autoparallel.graph.placement_graph import PlacementGraph
from gt_autoparallel.plan.placement_plan import ModelSignature, PlacementPlan
from gt_autoparallel.planner import Planner
from gt_autoparallel.prices.layer_memory import layer_memory
from gt_autoparallel.prices.recomputability import recomputable_nodes
from gt_autoparallel.problem.constraints import Constraints
from gt_autoparallel.problem.requested_memory import requested_memory

WIDTH, LAYERS = 64, 3
mm = torch.ops.aten.mm.default


def replicated(stack: Stack) -> PlacementPlan:
    constraints = Constraints(inputs={"x": [S0]}, parameters={"*": [R]})
    return planner_of_model(stack, MESH, (torch.empty(4096, WIDTH),)).find(constraints=constraints)


def test_the_gradient_of_a_weight_that_two_layers_read_is_never_to_come() -> None:
    tied, plain = Stack(LAYERS, WIDTH), Stack(LAYERS, WIDTH)
    tied.layers[0].up.weight = tied.layers[1].up.weight
    of_weight = tied.layers[0].up.weight.numel() * 4
    of_layer = 2 * of_weight + WIDTH * 4
    plans = [replicated(plain), replicated(tied)]
    assert all(audit_plan(each).relative_error < 1e-9 for each in plans)
    assert [each.memory.to_come_in_backward for each in plans] == [
        2 * of_layer,  # all but those of the layer whose turn it is
        2 * (of_layer - of_weight),
    ]


def reads_late(is_late: bool) -> PlacementGraph:
    """Two layers; the first one's backward may read what the second one made."""
    writer = GraphWriter()
    few, square = [spec(4, WIDTH)], [spec(WIDTH, WIDTH)]
    h = writer.add("input", "x", outputs=few, name="x")
    weights, made = {}, []
    for module in ("layers.0", "layers.1"):
        name = f"{module}.w"
        weights[module] = writer.add("parameter", name, outputs=square, name=name, module=module)
    for module, weight in weights.items():
        h = writer.add("operator", mm, h, weight, outputs=few, module=module)
        made.append(h)
    writer.add("output", "output", h)
    gradient = writer.add("tangent", "output/tangent", outputs=few, phase="backward")
    read = {"layers.1": made[0], "layers.0": made[1 if is_late else 0]}
    for module, value in read.items():
        place = {"module": module, "phase": "backward"}
        product = writer.add("operator", torch.ops.aten.mul.Tensor, value, gradient,
                             outputs=few, **place)  # fmt: skip
        transposed = writer.add("operator", torch.ops.aten.t.default, product,
                                outputs=[spec(WIDTH, 4)], **place)  # fmt: skip
        of_weight = writer.add("operator", mm, transposed, gradient, outputs=square, **place)
        writer.add("gradient", f"{module}.w", of_weight, **place)
    return writer.graph({})


def test_what_is_read_after_its_layers_turn_is_not_let_go_there() -> None:
    stays = []
    for is_late in (False, True):
        graph = reads_late(is_late)
        signature = ModelSignature(parameters={}, modules={}, graph_digest=graph_digest(graph))
        plan = Planner(graph, MESH, signature=signature).find()
        stays.append(plan.memory.saved_activations - plan.memory.let_go_at_reduction)
    of_product = 4 * WIDTH * 4 // MESH.sizes[0]
    assert stays == [0, of_product]


@pytest.mark.parametrize("share", [None, 0.65, 0.5])
@pytest.mark.parametrize("runs", [(2, 1, 0), (0, 1, 2)])
def test_a_gathered_weight_stays_until_the_last_layer_has_read_it(
    runs: tuple[int, ...], share: float | None
) -> None:
    """The first layer that is registered owns it, and its turn may come before others'."""
    tied = Stack(LAYERS, WIDTH, runs=runs)
    tied.layers[2].up.weight = tied.layers[0].up.weight
    planner = planner_of_model(tied, MESH, (torch.empty(256, WIDTH),))
    constraints = Constraints(inputs={"x": [S0]})
    plan = planner.find(constraints=constraints)
    if share is not None:
        budget = round(share * plan.memory.total)
        plan = planner.find(constraints=constraints, memory_budget_bytes=budget, relative_gap=0.02)
        assert plan.memory.total <= budget
    assert audit_plan(plan).relative_error < 1e-9


class Shifted(nn.Module):
    """Reads a table that its backward does not: only what runs again reads it there."""

    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.table = table
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.up(x) + self.table).sin().exp()


def test_what_runs_again_reads_a_gathered_weight_in_its_own_turn() -> None:
    tokens = 256
    table = nn.Parameter(torch.empty(tokens, WIDTH))
    stack = Stack(LAYERS, WIDTH, runs=(2, 1, 0))  # the owner of the table has the first turn
    stack.layers = nn.ModuleList([Shifted(table) for _ in range(LAYERS)])
    planner = planner_of_model(stack, MESH, (torch.empty(tokens, WIDTH),))
    graph = planner.graph
    free = planner.find(
        constraints=Constraints(inputs={"x": [R]}, parameters={"layers.0.table": [S0]})
    )
    shared = next(n.index for n in graph.nodes if n.kind == "share" and n.module == "layers.0")
    readers = {use.consumer for use in graph.uses if use.value.node == shared}
    assert {graph.nodes[reader].phase for reader in readers} == {"forward"}
    of_others = [
        node
        for node in sorted(recomputable_nodes(graph))
        if graph.nodes[node].module not in ("", "layers.0") and not is_view_like(graph.nodes[node])
    ]
    assert readers.intersection(of_others)
    turns = layer_turns(graph)
    assert shared not in read_late(graph, turns)
    assert shared in read_late(graph, turns, may_run_again=of_others)
    options = list(free.options)
    options[shared] = NodeOption(operands=((R,),), outputs=((R,),))  # gathered
    late = layer_memory(graph, options, MESH, recomputed=of_others).read_late["layers.0"]
    assert late == tokens * WIDTH * 4
    again = replace(free, options=tuple(options), recomputed=tuple(of_others))
    account = requested_memory(graph, options, MESH, free.request, recomputed=of_others)
    assert recounted_memory(again) == account
    assert saved_bytes(again, work_of_layers(graph.nodes)["backward"])[""] == late


class Product(torch.autograd.Function):
    """As fused losses do: the gradient of its weight is made in the forward."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x.sum(0))
        return x * weight

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (of_weight,) = context.saved_tensors
        return gradient * 2, of_weight


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(Product.apply(x, self.weight))


@pytest.mark.parametrize("parameters", [{}, {"*": [R]}])
def test_a_gradient_that_the_forward_made_is_read_at_the_end(parameters: Any) -> None:
    model = Stack(LAYERS, WIDTH)
    model.layers = nn.ModuleList([Fused() for _ in range(LAYERS)])
    constraints = Constraints(inputs={"x": [S0]}, parameters=parameters)
    plan = planner_of_model(model, MESH, (torch.empty(256, WIDTH),)).find(constraints=constraints)
    assert audit_plan(plan).relative_error < 1e-9
