"""Redistribution steps are judged by what they do to a miniature, not by rules about orders."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from plan_doubles import S0, S1, P, R, steps_by_hand
from torch.distributed.tensor import Shard

from gt_autoparallel.audit.step_walk import step_problems
from gt_autoparallel.graph.layouts import MeshShape, local_shape
from gt_autoparallel.graph.redistribution import RedistributionStep

ONE = MeshShape(names=("dp",), sizes=(4,))
TWO = MeshShape(names=("dp", "tp"), sizes=(4, 2))
THREE = MeshShape(names=("a", "b", "c"), sizes=(2, 2, 2))
SHAPE = (16, 32)


def step(kind, axis, source_dim, target_dim, before, after):
    return RedistributionStep(
        kind=kind,
        axis=axis,
        source_dim=source_dim,
        target_dim=target_dim,
        input_shape=before,
        output_shape=after,
    )


@pytest.mark.parametrize(
    ("source", "target", "one"),
    [
        (S0, R, step("all_gather", 0, 0, None, (4, 32), SHAPE)),
        (R, S1, step("slice", 0, None, 1, SHAPE, (16, 8))),
        (P, R, step("all_reduce", 0, None, None, SHAPE, SHAPE)),
        (P, S0, step("reduce_scatter", 0, None, 0, SHAPE, (4, 32))),
        (S0, S1, step("all_to_all", 0, 0, 1, (4, 32), (16, 8))),
    ],
)
def test_each_kind_of_step_leads_where_it_should_and_nowhere_else(source, target, one):
    assert step_problems(SHAPE, (source,), (target,), [one], ONE) == []
    for other in {S0, S1, R, P} - {target}:
        assert step_problems(SHAPE, (source,), (other,), [one], ONE) != []
    for other in {S0, S1, R, P} - {source}:
        assert step_problems(SHAPE, (other,), (target,), [one], ONE) != []


def test_any_change_of_a_step_is_noticed():
    one = step("all_to_all", 0, 0, 1, (4, 32), (16, 8))
    changes = (
        {"kind": "all_gather"},
        {"axis": 1},
        {"source_dim": 1, "target_dim": 0},
        {"target_dim": 2},
        {"source_dim": None},
        {"input_shape": (16, 32)},
        {"output_shape": (16, 16)},
    )
    for change in changes:
        assert step_problems(SHAPE, (S0,), (S1,), [replace(one, **change)], ONE) != [], change
    assert step_problems(SHAPE, (S0,), (S1,), [], ONE) != []
    assert step_problems(SHAPE, (S0,), (S1,), [one, one], ONE) != []


def test_a_dim_that_two_axes_shard_is_gathered_from_the_inner_one():
    inner = step("all_gather", 1, 0, None, (2, 32), (4, 32))
    outer = step("all_gather", 0, 0, None, (4, 32), (16, 32))
    assert step_problems(SHAPE, (S0, S0), (R, R), [inner, outer], TWO) == []
    wrong = [
        step("all_gather", 0, 0, None, (2, 32), (8, 32)),
        step("all_gather", 1, 0, None, (8, 32), (16, 32)),
    ]
    # Every shape is right here; the rows are in the wrong order.
    assert step_problems(SHAPE, (S0, S0), (R, R), wrong, TWO) == [
        "the steps end in another layout than the wanted one"
    ]


def test_a_dim_is_not_sliced_outside_of_what_shards_it_already():
    before, after = (8, 32), (2, 32)
    outside = [step("slice", 0, None, 0, before, after)]
    assert step_problems(SHAPE, (R, S0), (S0, S0), outside, TWO) == [
        "the steps end in another layout than the wanted one"
    ]
    inside = [step("slice", 1, None, 0, (4, 32), after)]
    assert step_problems(SHAPE, (S0, R), (S0, S0), inside, TWO) == []


def test_says_why_a_step_cannot_be_taken():
    cases = {
        "a sum counts the same numbers more than once": (
            (R,),
            (R,),
            step("all_reduce", 0, None, None, SHAPE, SHAPE),
        ),
        "tensors are summed that are different pieces": (
            (S0,),
            (R,),
            step("all_reduce", 0, None, None, SHAPE, SHAPE),
        ),
        "a slice of a tensor that the axis does not replicate": (
            (P,),
            (S0,),
            step("slice", 0, None, 0, SHAPE, (4, 32)),
        ),
        "dim 0 is gathered along an axis that does not shard it": (
            (R,),
            (R,),
            step("all_gather", 0, 0, None, SHAPE, SHAPE),
        ),
        "a step names dim 7 of a tensor of 2 dims": (
            (R,),
            (S0,),
            step("slice", 0, None, 7, SHAPE, (4, 32)),
        ),
        "all_gather from dim None to dim 1 is no step": (
            (R,),
            (S1,),
            step("all_gather", 0, None, 1, SHAPE, SHAPE),
        ),
    }
    for message, (source, target, one) in cases.items():
        assert step_problems(SHAPE, source, target, [one], ONE) == [message]


def test_an_uneven_cut_is_found_on_the_real_shape():
    one = step("slice", 0, None, 0, (6, 32), (1, 32))
    assert step_problems((6, 32), (R,), (S0,), [one], ONE) == [
        "step 0 cuts dim 0 of (6, 32) unevenly"
    ]


def test_every_pair_of_layouts_on_two_and_three_axes_has_steps_that_pass():
    """Gather all from the last axis on, then slice all from the first on: always right."""
    for mesh in (TWO, THREE):
        layouts = list(itertools.product((R, S0, Shard(1), P), repeat=mesh.num_axes))
        for source, target in itertools.product(layouts, repeat=2):
            if any(b == P != a for a, b in zip(source, target, strict=True)):
                continue
            whole = tuple(P if b == P else R for b in target)
            steps = steps_by_hand(SHAPE, source, whole, mesh)
            steps += steps_by_hand(SHAPE, whole, target, mesh)
            assert step_problems(SHAPE, source, target, steps, mesh) == []
            assert local_shape(SHAPE, target, mesh) == (
                steps[-1].output_shape if steps else local_shape(SHAPE, source, mesh)
            )
