"""What a rank runs: arguments keep their form, sizes are the rank's, and all of it can be traced."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_values import call, ids, ints
from simulated_ranks import Sample, node_of, option_text, spec_of, wrong_options
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.placement_graph import Value
from gt_autoparallel.rules import LocalCall, local_call, node_options
from gt_autoparallel.rules.views import joint_leading_dims

ONE = MeshShape(names=("tp",), sizes=(2,))
TWO = MeshShape(names=("dp", "tp"), sizes=(2, 2))


def chosen(
    sample: Sample, option: str, mesh: MeshShape = ONE, coordinate: tuple[int, ...] = (1,)
) -> LocalCall:
    node, operands, _ = node_of(sample)
    specs = tuple(spec_of(operand) for operand in operands)
    (found,) = [o for o in node_options(node, specs, mesh) if option_text(o) == option]
    local = local_call(node, found, specs, mesh, coordinate=coordinate)
    first = local_call(node, found, specs, mesh, coordinate=(0,) * mesh.num_axes)
    assert pytree.tree_structure((first.args, first.kwargs)) == pytree.tree_structure(
        (local.args, local.kwargs)
    )
    return local


def test_most_operators_run_as_they_are() -> None:
    local = chosen(call("sum.dim_IntList", ints(4, 4), [1], True), "S(1) -> P(sum)")
    assert local.function is torch.ops.aten.sum.dim_IntList
    assert local.args == (Value(0), [1], True)
    assert local.kwargs == {}


def test_sizes_become_those_of_the_shards() -> None:
    two = chosen(call("view", ints(8, 4), [2, 4, 4]), "S(0) -> S(0)")
    assert (two.function, two.args) == (torch.ops.aten.reshape.default, (Value(0), [1, 4, 4]))
    assert chosen(call("expand", ints(4, 1), [-1, 8]), "R -> S(1)").args == (Value(0), [4, 4])
    assert chosen(call("zeros", [4, 4]), " -> S(1)").args == ([4, 2],)
    assert chosen(call("new_zeros", ints(2), [8, 3]), "R -> S(0)").args == (Value(0), [4, 3])
    piece = chosen(call("slice_backward", ints(4, 2), [4, 8], 1, 1, 3, 1), "S(0) -> S(0)")
    assert piece.args == (Value(0), [2, 8], 1, 1, 3, 1)


def test_one_rank_adds_the_bias_of_a_partial_product() -> None:
    sample = call("addmm", ints(4), ints(4, 8), ints(8, 4))
    option = "R R, S(0) S(1), R S(0) -> S(0) P(sum)"
    adds = {
        coordinate: chosen(sample, option, TWO, coordinate).kwargs["beta"]
        for coordinate in ((0, 0), (0, 1), (1, 0), (1, 1))
    }
    assert adds == {(0, 0): 1, (0, 1): 0, (1, 0): 1, (1, 1): 0}


def test_a_vocabulary_parallel_embedding_is_the_same_operators_on_every_rank() -> None:
    sample = call("embedding", ints(8, 4), ids(4, below=8))
    graphs = []
    for coordinate in ((0,), (1,)):
        local = chosen(sample, "S(0), R -> P(sum)", ONE, coordinate)
        assert local.args == (Value(0), Value(1))
        graph = make_fx(local.function)(ints(4, 4), ids(4, below=8)).graph
        graphs.append([node.target for node in graph.nodes if node.op == "call_function"])
    assert graphs[0] == graphs[1]
    assert torch.ops.aten.embedding.default in graphs[0]


def test_a_mesh_of_one_rank_changes_nothing() -> None:
    alone = MeshShape(names=("a",), sizes=(1,))
    local = chosen(call("view", ints(4, 4), [16]), "S(0) -> S(0)", alone, (0,))
    assert (local.function, local.args) == (torch.ops.aten.view.default, (Value(0), [16]))


def test_leading_dims_of_groups_go_together() -> None:
    assert joint_leading_dims((8, 6), (2, 4, 6)) == ((0, 0), (1, 2))
    assert joint_leading_dims((4, 1, 6), (24,)) == ((0, 0),)
    assert joint_leading_dims((4, 6), (6, 4)) == ((0, 0),)
    assert joint_leading_dims((2, 3), (2, 1, 3)) == ((0, 0), (1, 2))
    assert joint_leading_dims((0, 3), (3, 0)) == ()


@st.composite
def reshapes(draw: Any) -> tuple[list[int], list[int]]:
    """Two shapes of the same number of elements."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=5))

    def grouped() -> list[int]:
        cuts = sorted(draw(st.sets(st.integers(1, len(factors)), max_size=4)) | {len(factors)})
        return [math.prod(factors[a:b]) for a, b in zip([0, *cuts[:-1]], cuts, strict=True)]

    return grouped(), draw(st.permutations(grouped()))


@settings(max_examples=40)
@given(reshapes())
def test_any_reshape_is_right_on_every_rank(shapes: tuple[list[int], list[int]]) -> None:
    source, target = shapes
    assert list(wrong_options(call("reshape", ints(*source), target), TWO)) == []
