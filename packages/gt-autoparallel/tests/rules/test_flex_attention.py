"""What FlexAttention may be cut along, and that every way gives what the whole operator gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from flex_attention_samples import CASES, samples_of
from simulated_ranks import Sample, options_of, wrong_options
from torch.distributed.tensor import Partial, Shard

from gt_autoparallel.graph.layouts import MeshShape, short_text
from gt_autoparallel.graph.options import NodeOption

TWO = MeshShape(names=("a",), sizes=(2,))
FOUR = MeshShape(names=("a",), sizes=(4,))
GRID = MeshShape(names=("a", "b"), sizes=(2, 2))

BATCH_ONLY, BOTH, HEADS_ONLY = {"batch"}, {"batch", "heads"}, {"heads"}


def ways(sample: Sample, mesh: MeshShape) -> set[str]:
    """Along what queries may be cut on one axis."""
    names = {Shard(0): "batch", Shard(1): "heads"}
    found = {option.operands[0][0] for option in options_of(sample, mesh)}
    return {names.get(placement, str(placement)) for placement in found if placement.is_shard()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("documents", BOTH),
        ("learned bias", BOTH),
        ("windows of heads", BOTH),
        ("samples and heads", BOTH),
        ("one key-value head", BOTH),
        ("keys of one sample", BOTH),
        ("number of the sample", HEADS_ONLY),
        ("number of the head", BATCH_ONLY),
    ],
)
def test_samples_and_heads_are_cut_where_functions_allow(name: str, expected: set[str]) -> None:
    forward, backward = samples_of(name)
    assert ways(forward, TWO) == expected
    assert ways(backward, TWO) == expected


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mesh", [TWO, FOUR, GRID], ids=["two", "four", "grid"])
def test_every_option_gives_the_global_result(name: str, mesh: MeshShape) -> None:
    for sample in samples_of(name):
        assert list(wrong_options(sample, mesh)) == []


def options_along(sample: Sample, mesh: MeshShape, dim: int) -> Iterator[NodeOption]:
    for option in options_of(sample, mesh):
        if option.operands[0] == (Shard(dim),) * mesh.num_axes:
            yield option


def test_a_mask_of_one_row_is_whole_and_a_bias_of_heads_is_cut() -> None:
    forward, backward = samples_of("learned bias")
    (option,) = options_along(forward, TWO, 1)
    # What samples look up stays whole, and what heads look up is cut.
    captured = sorted(short_text(layout) for layout in option.operands[-3:])
    assert captured == ["R", "S(0)", "S(0)"]
    masks = {layout[0] for layout in option.operands[3:11]}
    assert masks == {option.operands[3][0]}
    assert option.operands[3][0].is_replicate()
    (option,) = options_along(backward, TWO, 0)
    # Samples are apart: what they give to the bias of heads is a sum over ranks.
    gradients = [layout for layout in option.outputs[3:] if layout is not None]
    assert gradients.count((Partial("sum"),)) == 2


def test_keys_that_more_ranks_share_than_there_are_of_them_stay_whole() -> None:
    forward, backward = samples_of("documents")
    (option,) = options_along(forward, FOUR, 1)
    assert option.operands[1][0].is_replicate()
    (option,) = options_along(backward, FOUR, 1)
    assert option.outputs[1] == option.outputs[2] == (Partial("sum"),)
    # Where they can be cut, they are.
    (option,) = options_along(forward, TWO, 1)
    assert option.operands[1] == (Shard(1),)


def test_keys_are_cut_along_the_first_axis_that_cuts_heads() -> None:
    """The second axis would leave some ranks without the keys of their heads."""
    forward, _ = samples_of("documents")
    found = [option.operands[1] for option in options_along(forward, GRID, 1)]
    assert [layout for layout in found if layout[1] == Shard(1)] == []
    assert [layout for layout in found if layout[0] == Shard(1)] != []


def test_a_tensor_that_is_looked_up_and_read_whole_forbids_to_cut() -> None:
    forward, _ = samples_of("documents")
    function = forward.args[4][-1]
    lookups = [s for s in function.steps if s.target is torch.ops.aten.index.Tensor]
    sizes = torch.ops.aten.sum.default
    whole = dataclasses.replace(lookups[0], target=sizes, args=(lookups[0].args[0],))
    steps = tuple(whole if step is lookups[0] else step for step in function.steps)
    changed = dataclasses.replace(function, steps=steps)
    mask = (*forward.args[4][:-1], changed)
    sample = dataclasses.replace(forward, args=(*forward.args[:4], mask, *forward.args[5:]))
    assert ways(sample, TWO) == HEADS_ONLY
