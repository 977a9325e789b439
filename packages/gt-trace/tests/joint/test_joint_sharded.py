"""Joint graphs of sharded models on gloo processes give the bits of eager execution."""

from __future__ import annotations

import pytest
from fsdp_cases import Cell
from joint_sharded_cases import (
    differs_from_eager,
    gradients_behind_a_dtensor_output,
    gradients_that_share_memory,
)

from gt_trace.testing import GlooWorkers

CELLS = [
    Cell(mode="shard", extents=(2,)),
    Cell(mode="shard", extents=(2,), model="untied", precision="bf16"),
    Cell(mode="shard", extents=(2,), model="experts_dim_1", reduction="sum"),
    Cell(mode="replicate", extents=(2,)),
]
CHOICES: dict[str, dict[str, str]] = {
    "min_cut": {"partitioner": "min_cut"},
    "min_cut, parameters saved": {"partitioner": "min_cut", "gathered_parameters": "save"},
    "save_all": {"partitioner": "save_all"},
    "save_all, parameters gathered again": {
        "partitioner": "save_all",
        "gathered_parameters": "gather_again",
    },
}


# Each cell with one choice, and each choice with one cell, at every change.
TRAINED = [
    pytest.param(
        cell,
        choice,
        id=f"{choice}-{cell}",
        marks=[] if index == 0 or choice == "min_cut" else [pytest.mark.slow],
    )
    for choice in CHOICES
    for index, cell in enumerate(CELLS)
]


@pytest.mark.parametrize(("cell", "choice"), TRAINED)
def test_training_is_bitwise_that_of_eager(cell: Cell, choice: str, two: GlooWorkers) -> None:
    assert two.run(differs_from_eager, cell, CHOICES[choice]) == [[], []]


@pytest.mark.parametrize(
    ("cell", "stored_by"),
    [
        (CELLS[0], "this rank"),  # the ranks' shards are uneven, and so their graphs
        (CELLS[3], "rank 0"),
    ],
    ids=str,
)
def test_stored_graphs_give_the_same_bits(cell: Cell, stored_by: str, two: GlooWorkers) -> None:
    assert two.run(differs_from_eager, cell, CHOICES["min_cut"], stored_by) == [[], []]


@pytest.mark.parametrize(
    "cell",
    [
        Cell(mode="shard", extents=(2,), tp=2),
        Cell(mode="hybrid_shard", extents=(2, 2)),
    ],
    ids=str,
)
def test_training_is_bitwise_that_of_eager_on_four_ranks(cell: Cell, four: GlooWorkers) -> None:
    assert four.run(differs_from_eager, cell, CHOICES["min_cut"]) == [[]] * 4


def test_no_two_gradients_share_memory(two: GlooWorkers) -> None:
    assert two.run(gradients_that_share_memory, CELLS[0]) == [[], []]


def test_a_gradient_arrives_at_a_dtensor_as_told_or_is_redistributed(two: GlooWorkers) -> None:
    assert two.run(gradients_behind_a_dtensor_output) == [[], []]
