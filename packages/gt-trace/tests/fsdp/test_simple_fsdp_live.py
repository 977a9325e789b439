"""Sharded models on real ranks: values, captures, copies and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from fsdp_cases import Cell
from fsdp_live_cases import (
    captured_differs_from_eager,
    copies_compute_as_the_original,
    gathered_reads_whole_values,
    load_checkpoint,
    save_checkpoint,
    undo_restores_every_value,
)

from gt_trace.testing import GlooWorkers

CELLS = [
    Cell(mode="shard", extents=(4,)),
    Cell(mode="hybrid_shard", extents=(2, 2), model="experts_dim_1"),
    Cell(mode="shard", extents=(2,), tp=2),
    Cell(mode="replicate", extents=(4,), model="untied"),
]
SAVED_BY_4 = Cell(mode="shard", extents=(4,), model="untied")
SAVED_BY_2_X_2 = Cell(mode="shard", extents=(2,), tp=2, model="untied")


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_undo_restores_every_value(four: GlooWorkers, cell: Cell) -> None:
    assert four.run(undo_restores_every_value, cell) == [True] * 4


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_inside_gathered_every_read_is_the_whole_value(four: GlooWorkers, cell: Cell) -> None:
    assert four.run(gathered_reads_whole_values, cell) == [True] * 4


@pytest.mark.parametrize(
    "cell",
    [
        Cell(mode="shard", extents=(4,)),
        Cell(mode="hybrid_shard", extents=(2, 2)),
        Cell(mode="shard", extents=(2,), tp=2),
        Cell(mode="replicate", extents=(4,), precision="bf16"),
    ],
    ids=str,
)
def test_captured_step_equals_the_eager_one_to_the_last_bit(four: GlooWorkers, cell: Cell) -> None:
    assert four.run(captured_differs_from_eager, cell) == [[]] * 4


# Not with tensor parallelism: torch's parallelize_module leaves hooks that cannot be pickled.
@pytest.mark.parametrize("cell", CELLS[:2], ids=str)
def test_copies_compute_as_the_original(four: GlooWorkers, cell: Cell) -> None:
    assert four.run(copies_compute_as_the_original, cell) == [[True, True]] * 4


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (SAVED_BY_4, Cell(mode="shard", extents=(2,), model="untied")),
        (SAVED_BY_4, Cell(mode="replicate", extents=(2,), model="untied")),
        (SAVED_BY_2_X_2, Cell(mode="shard", extents=(1,), tp=2, model="untied")),
    ],
    ids=str,
)
def test_checkpoint_of_four_ranks_loads_on_two(
    four: GlooWorkers, two: GlooWorkers, tmp_path: Path, saved: Cell, loaded: Cell
) -> None:
    four.run(save_checkpoint, saved, str(tmp_path))
    assert two.run(load_checkpoint, loaded, str(tmp_path)) == [[]] * 2


def test_checkpoint_of_a_tensor_parallel_model_loads_without_tensor_parallelism(
    four: GlooWorkers, two: GlooWorkers, tmp_path: Path
) -> None:
    # The same model in extents that tensor parallelism can split.
    plain = Cell(mode="shard", extents=(2,), model="untied", hidden=8)
    four.run(save_checkpoint, SAVED_BY_2_X_2, str(tmp_path))
    assert two.run(load_checkpoint, plain, str(tmp_path)) == [[]] * 2
