"""Constants and subgraphs are the same where their content is, whatever they are named."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from expecttest import assert_expected_inline
from mutation_graphs import capture_attention
from mutation_kinds import Mutate, find_bugs
from mutations_of_attributes import edited_subgraph
from pass_graphs import capture, node_of
from torch.fx import GraphModule

from gt_passes import PassManager, VerificationError
from gt_passes.analysis.graph_constants import FrozenAttribute, freeze_attribute


def frozen(graph_module: GraphModule, name: str) -> FrozenAttribute:
    return freeze_attribute(graph_module, node_of(graph_module, name))


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        ([0.0, float("nan")], True),
        ([-0.0, float("nan")], False),
        ([0.0, 1.0], False),
        ([[0.0, float("nan")]], False),
    ],
)
def test_constants_are_told_apart_by_their_bits(other: list[float], is_same: bool):
    def held(values: list[float]) -> FrozenAttribute:
        graph_module = capture(lambda x: x + torch.tensor(values), torch.ones(2))
        return frozen(graph_module, "_tensor_constant0")

    assert (held([0.0, float("nan")]) == held(other)) == is_same


def test_an_edited_subgraph_is_another_and_a_copy_is_not():
    graph_module = capture_attention().graph_module
    before = frozen(graph_module, "sdpa_mask0")
    assert before == frozen(copy.deepcopy(graph_module), "sdpa_mask0")
    assert before != frozen(graph_module, "sdpa_score0")
    for _, edit in edited_subgraph(graph_module.graph):
        edit(graph_module.graph, {})
    assert before != frozen(graph_module, "sdpa_mask0")


def test_says_which_subgraph_a_pass_edited():
    step = capture_attention()
    (bug,) = [
        bug for bug in find_bugs(step.graph_module.graph, "edited-subgraph") if "mask" in bug.site
    ]
    with pytest.raises(VerificationError) as error:
        PassManager([Mutate(bug=bug)], context=step.context).run(step.graph_module)
    assert_expected_inline(
        re.sub("[0-9a-f]{8}", "DIGEST", str(error.value.problems[0])),
        """\
[dataflow] node sdpa_mask0
output 0 (exp) is not computed as before
expected the subgraph DIGEST, as in node sdpa_mask0
got      the subgraph DIGEST, as in node sdpa_mask0""",
    )


@pytest.mark.parametrize("how", ["data", "storage", "numpy", "in place"])
@pytest.mark.parametrize("num_elements", [8, 2**19])
def test_an_edit_of_a_constant_is_seen_however_it_was_made(how: str, num_elements: int):
    constant = torch.zeros(num_elements)
    graph_module = capture(lambda x: x + constant, torch.ones(num_elements))
    (node,) = graph_module.graph.find_nodes(op="get_attr")
    before = freeze_attribute(graph_module, node)
    assert freeze_attribute(graph_module, node) == before
    if how == "data":
        constant.data[-1] = 1.0
    elif how == "storage":
        storage = constant.untyped_storage()
        storage[len(storage) - 1] = 1
    elif how == "numpy":
        constant.numpy()[-1] = 1.0
    else:
        constant[-1] = 1.0
    assert freeze_attribute(graph_module, node) != before
