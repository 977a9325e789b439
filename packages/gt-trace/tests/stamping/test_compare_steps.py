"""The comparison of two captures sees every kind of difference, and none where there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from stamp_models import Toy, step_of, tokens
from torch.fx import Node

from gt_trace import TracedStep, trace_step
from gt_trace.stamping import step_differences


def capture() -> TracedStep:
    model = Toy(1)
    return trace_step(step_of(model), module=model)(tokens())


@pytest.fixture(scope="module")
def reference() -> TracedStep:
    return capture()


def node(step: TracedStep, target: object, index: int = 0) -> Node:
    found = [each for each in step.graph_module.graph.nodes if each.target is target]
    return found[index]


aten = torch.ops.aten


def rename(step: TracedStep) -> None:
    node(step, aten.relu.default).name = "other"


def change_operand(step: TracedStep) -> None:
    add = node(step, aten.add.Tensor)
    add.args = (add.args[0], 0.5)


def swap_operands(step: TracedStep) -> None:
    add = node(step, aten.add.Tensor, 1)
    add.args = tuple(reversed(add.args))


def change_operator(step: TracedStep) -> None:
    node(step, aten.relu.default).target = aten.sigmoid.default


def drop_node(step: TracedStep) -> None:
    view = node(step, aten.relu.default)
    view.replace_all_uses_with(view.args[0])
    step.graph_module.graph.erase_node(view)


def change_number(step: TracedStep) -> None:
    node(step, aten.relu.default).meta["seq_nr"] += 1


def change_annotation(step: TracedStep) -> None:
    meta = node(step, aten.relu.default).meta
    meta["custom"] = {**meta["custom"], "gt.module": {"fqn": "elsewhere"}}


def change_trace(step: TracedStep) -> None:
    node(step, aten.relu.default).stack_trace = "elsewhere"


def change_shape(step: TracedStep) -> None:
    meta = node(step, aten.relu.default).meta
    meta["val"] = meta["val"].new_empty(1)


def lose_alias(step: TracedStep) -> None:
    view = next(each for each in step.graph_module.graph.nodes if each.target is aten.view.default)
    with step.fake_mode:
        view.meta["val"] = view.meta["val"].clone()


CHANGES: dict[str, tuple[Callable[[TracedStep], None], str]] = {
    "name": (rename, "names: other: relu"),
    "constant operand": (change_operand, "operands: "),
    "order of operands": (swap_operands, "operands: "),
    "operator": (change_operator, "operators: relu: aten.relu.default"),
    "number of nodes": (drop_node, "number of nodes: "),
    "autograd number": (change_number, "autograd numbers: relu: "),
    "annotation": (change_annotation, "custom: relu: "),
    "stack trace": (change_trace, "stack_trace: relu: 'elsewhere'"),
    "shape": (change_shape, "val"),
    "shared memory": (lose_alias, "val"),
}


def test_two_captures_of_one_model_are_the_same(reference: TracedStep) -> None:
    assert step_differences(capture(), reference) == []


@pytest.mark.parametrize("name", CHANGES)
def test_difference_between_graphs_is_seen(name: str, reference: TracedStep) -> None:
    change, expected = CHANGES[name]
    step = capture()
    change(step)
    found = step_differences(step, reference)
    assert any(line.startswith(expected) for line in found), found


def test_difference_around_the_graph_is_seen(reference: TracedStep) -> None:
    step = capture()
    fewer = replace(step, output_layouts=step.output_layouts[1:])
    assert [line.partition(":")[0] for line in step_differences(fewer, reference)] == [
        "TracedStep.output_layouts"
    ]
