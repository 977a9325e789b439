"""A mean loss is planned as a sum and a division, which compute the same bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sample_values import ids, ints, positive
from torch import nn

from gt_autoparallel.graph.capture import DECOMPOSITIONS, capture_placement_graph, is_decomposed
from gt_autoparallel.graph.layouts import MeshShape, short_text
from gt_autoparallel.rules import check_operators, node_options

NLL_LOSS = torch.ops.aten.nll_loss_forward.default


class Classifier(nn.Module):
    """A model that computes its own loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x), labels)


@pytest.mark.parametrize("weight", [None, positive(8).float()], ids=["plain", "weighted"])
def test_equals_the_operator_in_every_bit(weight: torch.Tensor | None) -> None:
    args = (ints(64, 8).float().log_softmax(1), ids(64, below=8), weight, 1, 3)
    assert is_decomposed(NLL_LOSS, args)
    for mine, expected in zip(DECOMPOSITIONS[NLL_LOSS](*args), NLL_LOSS(*args), strict=True):
        assert torch.equal(mine, expected)


def test_leaves_sums_as_they_are() -> None:
    args = (ints(4, 8), ids(4, below=8), None, 2, -100)
    assert not is_decomposed(NLL_LOSS, args)
    assert DECOMPOSITIONS[NLL_LOSS](*args) is NotImplemented


def test_the_loss_of_a_captured_model_can_be_sharded_by_samples() -> None:
    graph = capture_placement_graph(Classifier(), (torch.zeros(8, 4), ids(8, below=8)))
    check_operators(graph)
    (loss,) = [node for node in graph.nodes if node.target is NLL_LOSS]
    operands = tuple(graph.spec(value) for value in loss.operands)
    options = node_options(loss, operands, MeshShape(names=("dp",), sizes=(4,)))
    assert [tuple(map(short_text, option.operands)) for option in options] == [
        ("R", "R"),
        ("S(0)", "S(0)"),
    ]
