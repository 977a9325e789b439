"""Calls that are added to a graph: their values, their annotations, and those that are refused."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from gt_config.node_keys import FsdpCollectiveAnnotation, ModuleAnnotation, PhaseAnnotation
from gt_passes import call_like
from gt_passes._torch_internals import fake_mode_of, is_fake_tensor
from gt_passes.errors import GraphInputError
from gt_trace.node_metadata import node_annotations, write_annotation

aten = torch.ops.aten

OF_ITS_PLACE = (ModuleAnnotation(fqn="layers.0"), PhaseAnnotation(phase="backward"))


@pytest.fixture
def graph_module() -> GraphModule:
    return make_fx(lambda x: x.cos(), tracing_mode="fake")(torch.ones(2, 3))


@pytest.fixture
def cos(graph_module: GraphModule) -> Node:
    (node,) = graph_module.graph.find_nodes(op="call_function", target=aten.cos.default)
    return node


def added(cos: Node, target, *args) -> Node:
    with cos.graph.inserting_after(cos):
        return call_like(cos, target, *args)


def test_an_operator_without_inputs_gets_a_fake_value(cos):
    value = added(cos, aten.zeros.default, [4]).meta["val"]
    assert is_fake_tensor(value)
    assert value.fake_mode is fake_mode_of(cos.graph)


def test_a_new_call_changes_no_recorded_value(cos):
    (x,) = cos.all_input_nodes
    assert added(cos, aten.t_.default, x).meta["val"].shape == (3, 2)
    assert x.meta["val"].shape == (2, 3)


def test_a_call_that_its_operator_refuses_is_not_left_in_the_graph(cos):
    before = list(cos.graph.nodes)
    with pytest.raises(RuntimeError, match="reduction dim"):
        added(cos, aten.mm.default, cos, cos)
    assert list(cos.graph.nodes) == before
    assert list(cos.users) == [before[-1]]


def test_a_new_call_belongs_to_the_module_the_phase_and_the_line_alone(cos):
    gathering = FsdpCollectiveAnnotation(kind="unshard", parameter_names=("w",), mesh_axis="dp")
    for annotation in (*OF_ITS_PLACE, gathering):
        write_annotation(cos, annotation)
    of_its_place = {"stack_trace": "line 1", "autograd_backward": True}
    cos.meta |= {**of_its_place, "eager_input_vals": ((), {}), "seq_nr": 3}
    node = added(cos, aten.sin.default, cos)
    custom, value = node.meta.pop("custom"), node.meta.pop("val")
    assert custom == {key: text for each in OF_ITS_PLACE for key, text in each.to_meta().items()}
    assert value.shape == (2, 3)
    assert node.meta == of_its_place
    assert gathering.KEY in node_annotations(cos)


def test_a_graph_without_fake_values_is_refused():
    graph = Graph()
    with pytest.raises(GraphInputError, match="trace with fake tensors"):
        call_like(graph.placeholder("x"), aten.zeros.default, [4])
    assert len(graph.nodes) == 1
