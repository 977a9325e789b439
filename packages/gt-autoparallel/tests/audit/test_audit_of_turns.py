"""What the audit lets come and go in the turns of layers, on graphs that need a closer look."""

from __future__ import annotations

import torch
from plan_doubles import S0, R
from planned_models import MESH, Stack
from random_graphs import GraphWriter, spec

from gt_autoparallel.audit.plan_audit import audit_plan, examined
from gt_autoparallel.find import planner_of_model
from gt_autoparallel.graph.graph_encoding import graph_digest
from gt_autoparallel.graph.placement_graph import PlacementGraph
from gt_autoparallel.plan.placement_plan import ModelSignature, PlacementPlan
from gt_autoparallel.planner import Planner
from gt_autoparallel.problem.constraints import Constraints

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
    for is_late in (False, True):
        graph = reads_late(is_late)
        signature = ModelSignature(parameters={}, modules={}, graph_digest=graph_digest(graph))
        plan = Planner(graph, MESH, signature=signature).find(audit=False)
        found = [each for each in examined(plan, None)[0] if " take " in each]
        assert [each.split(" take ")[0] for each in found] == (
            ["let go in backward", "let go at reduction"] if is_late else []
        ), found
