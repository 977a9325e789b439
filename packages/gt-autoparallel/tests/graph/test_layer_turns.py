"""Which layers take turns in the backward, as the planner and the audit see it, each for itself."""

from __future__ import annotations

import pytest
import torch
from planned_models import MESH, NormedBlock, Stack
from random_graphs import GraphWriter, spec
from torch import nn

from gt_autoparallel.audit.memory_checks import (
    backward_turns,
    parameters_read_elsewhere,
    work_of_layers,
)
from gt_autoparallel.find import planner_of_model
from gt_autoparallel.graph.layer_turns import NO_TURNS, layer_turns
from gt_autoparallel.graph.placement_graph import PlacementGraph

WIDTH = 8
mm, add = torch.ops.aten.mm.default, torch.ops.aten.add.Tensor


def graph_of(model: nn.Module) -> PlacementGraph:
    return planner_of_model(model, MESH, (torch.empty(16, WIDTH),)).graph


def turns_of(model: nn.Module) -> tuple[str, ...]:
    graph = graph_of(model)
    turns = layer_turns(graph)
    assert backward_turns(work_of_layers(graph.nodes)) == [*reversed(turns.layers)]
    return turns.layers


def test_layers_take_turns_as_they_run_whatever_they_are_called() -> None:
    assert turns_of(Stack(3, WIDTH)) == ("layers.0", "layers.1", "layers.2")
    assert turns_of(Stack(3, WIDTH, runs=(2, 0, 1))) == ("layers.2", "layers.0", "layers.1")


def test_with_a_layer_that_runs_twice_none_has_a_turn() -> None:
    assert turns_of(Stack(3, WIDTH, runs=(0, 1, 0, 2))) == ()
    # Twice without another one in between is one turn.
    assert turns_of(Stack(3, WIDTH, runs=(0, 1, 1, 2))) == ("layers.0", "layers.1", "layers.2")


class Halves(nn.Module):
    """Two layers that run in halves, one of each in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([NormedBlock(WIDTH) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layers
        wide = second.up(first.up(first.norm(x))[:, :WIDTH])
        return first.down(wide) + second.down(wide)


def test_where_layers_run_partly_none_has_a_turn() -> None:
    assert turns_of(Halves()) == ()


class HalfPrecision(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = {name: each.half() for name, each in self.layers.named_parameters()}
        for number, layer in enumerate(self.layers):
            own = {name: halves[f"{number}.{name}"] for name, _ in layer.named_parameters()}
            x = torch.func.functional_call(layer, own, x)
        return x


def test_casts_of_parameters_and_gradients_may_stand_anywhere() -> None:
    graph = planner_of_model(
        HalfPrecision(2, WIDTH), MESH, (torch.empty(16, WIDTH, dtype=torch.float16),)
    ).graph
    casts = [node.index for node in graph.nodes if "_to_copy" in str(node.target)]
    assert len(casts) >= 2 * 6
    assert layer_turns(graph).layers == ("layers.0", "layers.1")
    assert backward_turns(work_of_layers(graph.nodes)) == ["layers.1", "layers.0"]


class Frozen(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.layers[0](x)
        return self.layers[2](self.layers[1](x))


def test_a_layer_without_a_backward_has_no_turn_and_takes_none_away() -> None:
    assert turns_of(Frozen(3, WIDTH)) == ("layers.1", "layers.2")


def tied() -> Stack:
    stack = Stack(3, WIDTH)
    stack.layers[2].up.weight = stack.layers[1].up.weight
    return stack


def test_gradients_come_in_turn_but_for_those_of_parameters_that_others_read() -> None:
    graph = graph_of(tied())
    turns = layer_turns(graph)
    of_parameters = {str(graph.nodes[node].target): of for node, of in turns.gradients.items()}
    assert of_parameters == {
        f"layers.{number}.{name}": f"layers.{number}"
        for number in range(3)
        for name in ("norm.weight", "up.weight", "down.weight")
        if (number, name) not in {(1, "up.weight"), (2, "up.weight")}
    }
    assert parameters_read_elsewhere(graph.nodes) == {"layers.1.up.weight"}
    assert parameters_read_elsewhere(graph_of(Stack(2, WIDTH)).nodes) == set()


def written(forward: str, backward: str) -> PlacementGraph:
    """Layers that each run an operator on x where their number stands."""
    writer, square = GraphWriter(), [spec(8, 8)]
    x = writer.add("input", "x", outputs=square, name="x")
    weights = {}
    for number in sorted({*forward}):
        module = f"layers.{number}"
        weights[number] = writer.add(
            "parameter", f"{module}.w", outputs=square, name=f"{module}.w", module=module
        )
    total = x
    for number in forward:
        module = f"layers.{number}"
        of_layer = writer.add("operator", mm, x, weights[number], outputs=square, module=module)
        total = writer.add("operator", add, total, of_layer, outputs=square)
    writer.add("output", "output", total)
    of_output = writer.add("tangent", "output/tangent", outputs=square, phase="backward")
    gradients = {}
    for number in backward:
        place = {"module": f"layers.{number}", "phase": "backward"}
        gradients[number] = writer.add("operator", mm, x, of_output, outputs=square, **place)
    for number, gradient in gradients.items():
        module = f"layers.{number}"
        writer.add("gradient", f"{module}.w", gradient, module=module, phase="backward")
    return writer.graph({})


@pytest.mark.parametrize(
    ("forward", "backward", "turns"),
    [
        ("012", "210", ["layers.0", "layers.1", "layers.2"]),
        ("012", "012", []),
        ("01", "1010", []),
        ("010", "10", []),
        ("0112", "2100", ["layers.0", "layers.1", "layers.2"]),
    ],
)
def test_turns_are_of_layers_that_run_in_one_stretch_forwards_and_then_backwards(
    forward: str, backward: str, turns: list[str]
) -> None:
    graph = written(forward, backward)
    assert [*layer_turns(graph).layers] == turns
    assert backward_turns(work_of_layers(graph.nodes)) == turns[::-1]


def test_without_a_backward_nothing_has_a_turn() -> None:
    nodes = [node for node in graph_of(Stack(2, WIDTH)).nodes if node.phase == "forward"]
    graph = PlacementGraph(nodes=tuple(nodes), parameter_aliases={})
    assert layer_turns(graph) == NO_TURNS
    assert backward_turns(work_of_layers(graph.nodes)) == []
