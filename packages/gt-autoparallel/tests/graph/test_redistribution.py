"""Steps bring every rank's shard where it belongs, in the cheapest order."""

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from gt_autoparallel.errors import PlacementInputError
from gt_autoparallel.graph.layouts import Layout, MeshShape, fits
from gt_autoparallel.graph.redistribution import (
    RedistributionStep,
    can_redistribute,
    redistribution_steps,
)

R, P = Replicate(), Partial()
S0, S1 = Shard(0), Shard(1)
MESH = MeshShape(names=("a", "b"), sizes=(2, 3))

Ranks = dict[tuple[int, ...], NDArray[np.int64]]


def distributed(whole: NDArray[np.int64], layout: Layout, mesh: MeshShape) -> Ranks:
    """What each rank holds; of a partial sum the first rank holds all, the others nothing."""
    ranks = {}
    for coordinate in itertools.product(*map(range, mesh.sizes)):
        local = whole
        for placement, size, at in zip(layout, mesh.sizes, coordinate, strict=True):
            if isinstance(placement, Shard):
                local = np.split(local, size, placement.dim)[at]
            elif isinstance(placement, Partial):
                local = local if at == 0 else np.zeros_like(local)
        ranks[coordinate] = local
    return ranks


def after_step(ranks: Ranks, step: RedistributionStep) -> Ranks:
    result = {}
    for coordinate, local in ranks.items():
        assert local.shape == step.input_shape
        group = sorted(
            other
            for other in ranks
            if all(a == b for i, (a, b) in enumerate(zip(other, coordinate, strict=True))
                   if i != step.axis)
        )  # fmt: skip
        at = coordinate[step.axis]
        if step.kind == "slice":
            new = np.split(local, len(group), step.target_dim)[at]
        elif step.kind == "all_gather":
            new = np.concatenate([ranks[other] for other in group], step.source_dim)
        elif step.kind == "all_to_all":
            new = np.concatenate(
                [np.split(ranks[other], len(group), step.target_dim)[at] for other in group],
                step.source_dim,
            )
        else:
            new = sum((ranks[other] for other in group), np.zeros_like(local))
            if step.kind == "reduce_scatter":
                new = np.split(new, len(group), step.target_dim)[at]
        assert new.shape == step.output_shape
        result[coordinate] = new
    return result


def layouts_of(shape: tuple[int, ...], mesh: MeshShape) -> list[Layout]:
    placements: list[Placement] = [R, P, *(Shard(dim) for dim in range(len(shape)))]
    combinations = itertools.product(placements, repeat=mesh.num_axes)
    return [layout for layout in combinations if fits(shape, layout, mesh)]


def total(ranks: Ranks, layout: Layout) -> Ranks:
    """Partial sums finished along their axes, for comparing."""
    for axis, placement in enumerate(layout):
        if not isinstance(placement, Partial):
            continue
        sums: dict[tuple[int, ...], NDArray[np.int64]] = {}
        for coordinate, local in ranks.items():
            key = (*coordinate[:axis], 0, *coordinate[axis + 1 :])
            sums[key] = sums[key] + local if key in sums else local
        ranks = {c: sums[(*c[:axis], 0, *c[axis + 1 :])] for c in ranks}
    return ranks


@pytest.mark.parametrize(
    ("shape", "sizes"), [((6, 12), (2, 3)), ((4, 2), (2, 2)), ((4,), (2, 2, 2)), ((5,), (4,))]
)
def test_every_pair_of_layouts_arrives(shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    mesh = MeshShape(names=("a", "b", "c")[: len(sizes)], sizes=sizes)
    whole = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    layouts = layouts_of(shape, mesh)
    for source, target in itertools.product(layouts, repeat=2):
        if not can_redistribute(source, target):
            continue
        ranks = distributed(whole, source, mesh)
        for step in redistribution_steps(shape, source, target, mesh):
            ranks = after_step(ranks, step)
        got = total(ranks, target)
        wanted = total(distributed(whole, target, mesh), target)
        for coordinate, local in wanted.items():
            assert np.array_equal(got[coordinate], local), (source, target)


def kinds(shape: tuple[int, ...], source: Layout, target: Layout) -> list[tuple[str, int]]:
    return [(step.kind, step.axis) for step in redistribution_steps(shape, source, target, MESH)]


def test_what_shrinks_goes_first_and_what_grows_last() -> None:
    assert kinds((6, 6), (S0, P), (R, S1)) == [("reduce_scatter", 1), ("all_gather", 0)]
    assert kinds((6, 6), (S0, R), (R, S1)) == [("slice", 1), ("all_gather", 0)]


def test_the_first_axis_carries_less() -> None:
    assert kinds((6, 6), (S0, S1), (R, R)) == [("all_gather", 0), ("all_gather", 1)]
    assert kinds((6, 6), (P, P), (S0, S1)) == [("reduce_scatter", 1), ("reduce_scatter", 0)]


def test_shards_of_one_dim_are_undone_from_the_last_axis() -> None:
    assert kinds((6, 6), (S0, S0), (R, R)) == [("all_gather", 1), ("all_gather", 0)]
    assert kinds((6, 6), (R, R), (S0, S0)) == [("slice", 0), ("slice", 1)]


def test_a_later_cut_of_the_same_dim_is_undone_before_an_earlier_one_is_made() -> None:
    assert kinds((6, 6), (R, S0), (S0, S0)) == [
        ("all_gather", 1),
        ("slice", 0),
        ("slice", 1),
    ]


def test_axes_of_one_rank_have_no_step() -> None:
    mesh = MeshShape(names=("a", "b"), sizes=(1, 2))
    (step,) = redistribution_steps((4,), (P, P), (S0, R), mesh)
    assert (step.kind, step.axis) == ("all_reduce", 1)


def test_refuses_layouts_that_do_not_fit_and_sums_out_of_nothing() -> None:
    with pytest.raises(ValueError, match="redistribution") as error:
        redistribution_steps((5, 6), (S0, R), (R, P), MESH)
    assert str(error.value) == (
        "redistribution on mesh {'a': 2, 'b': 3}: source S(0) R does not cut shape (5, 6) evenly; "
        "S(0) R cannot become R P(sum): only a sum that is partial before can be partial after"
    )


def test_only_sums_are_left_unfinished() -> None:
    with pytest.raises(PlacementInputError) as error:
        can_redistribute((Partial("max"),), (R,))
    assert str(error.value) == "placement Partial(max); allowed: Partial(sum)"
