"""A graph written down comes back the same, and its digest notices every change."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from plan_doubles import S0, P, R, spec, two_layer_graph
from torch.distributed.tensor import Shard

from gt_autoparallel.errors import PlanMismatchError, UnsupportedModelError
from gt_autoparallel.graph.graph_encoding import (
    canonical_json,
    decode_graph,
    decode_layout,
    encode_graph,
    encode_layout,
    graph_digest,
    spec_text,
)
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode, Value

aten = torch.ops.aten


def graph_with(*args: object, **kwargs: object) -> PlacementGraph:
    source = PlacementNode(index=0, name="a", kind="input", target="a", outputs=(spec((2, 3)),))
    node = PlacementNode(
        index=1,
        name="b",
        kind="operator",
        target=aten._to_copy.default,
        args=(Value(0), *args),
        kwargs=kwargs,
        outputs=(spec((2, 3)), None),
    )
    return PlacementGraph(nodes=(source, node), parameter_aliases={"tied": "a"})


def through_json(graph: PlacementGraph) -> PlacementGraph:
    return decode_graph(json.loads(canonical_json(encode_graph(graph))))


def test_every_kind_of_argument_comes_back_with_its_type():
    graph = graph_with(
        [1, 2.5, (True, None)],
        math.inf,
        "causal",
        torch.device("cpu"),
        {"scale": 0.5},
        dtype=torch.bfloat16,
        layout=torch.strided,
        memory_format=torch.contiguous_format,
    )
    assert through_json(graph) == graph
    assert through_json(graph).nodes[1].target is aten._to_copy.default


def test_a_whole_graph_comes_back_the_same():
    graph = two_layer_graph()
    assert through_json(graph) == graph
    assert graph_digest(through_json(graph)) == graph_digest(graph)


def test_the_digest_notices_a_change_of_anything():
    digests = {graph_digest(graph_with(*args)) for args in ((1,), (1.0,), (True,), ([1],), ((1,),))}
    assert len(digests) == 5
    graph = two_layer_graph()
    changes = (
        {"name": "other"},
        {"target": aten.mm.dtype},
        {"module": "layers.9"},
        {"phase": "backward"},
        {"outputs": (spec((1, 1)),)},
        {"kwargs": {"x": 1}},
    )
    for change in changes:
        nodes = tuple(
            replace(node, **change) if node.name == "mm0" else node for node in graph.nodes
        )
        assert graph_digest(replace(graph, nodes=nodes)) != graph_digest(graph), change


def test_refuses_an_argument_that_cannot_be_written_down():
    with pytest.raises(UnsupportedModelError) as error:
        encode_graph(graph_with(1j))
    assert str(error.value) == (
        "node b (aten._to_copy.default) has an argument of type complex: 1j; "
        "allowed: tensors, numbers, strings, dtypes, devices, and lists, tuples and dictionaries "
        "of them"
    )


def test_refuses_an_operator_that_this_pytorch_does_not_have():
    content = encode_graph(two_layer_graph())
    content["nodes"][4]["target"] = {"operator": ["aten", "forgotten", "default"]}
    with pytest.raises(PlanMismatchError, match=r"operator 'aten\.forgotten\.default' does not"):
        decode_graph(content)


def test_layouts_read_as_people_write_them():
    layout = (S0, R, P, Shard(12))
    assert encode_layout(layout) == "S(0) R P(sum) S(12)"
    assert decode_layout("S(0) R P(sum) S(12)") == layout
    assert decode_layout(encode_layout(None)) is None
    with pytest.raises(PlanMismatchError) as error:
        decode_layout("S(x)")
    assert str(error.value) == "placement 'S(x)'; allowed: R, S(dim), P(sum)"


def test_a_tensor_in_words():
    assert spec_text(spec((4, 8))) == "float32[4, 8]"
