"""What is drawn of a plan: equal layers once, and everything that moves, once each."""

from __future__ import annotations

import pytest
from plan_doubles import FSDP, TENSOR_PARALLEL, plan_by_hand
from planned_models import plan

from gt_autoparallel.plan.plan_picture import (
    drawn_layers,
    part_of,
    times_in_full,
    windows_of_layers,
)
from gt_autoparallel.plan.report_page import report_page


def test_layers_that_are_alike_are_drawn_once_by_the_names_of_the_first() -> None:
    drawn = [layer for layer in drawn_layers(plan()) if layer.parameters]
    assert sum(layer.count for layer in drawn) == 4
    assert len(drawn) < 4
    several = next(layer for layer in drawn if layer.count > 1)
    assert several.name == "layers.1-3"
    assert [(each.name, each.full_name) for each in several.parameters] == [
        ("up.weight", "layers.1.up.weight"),
        ("down.weight", "layers.1.down.weight"),
    ]


def test_everything_that_moves_is_drawn() -> None:
    found = plan()
    drawn = drawn_layers(found)
    moves = [
        (move, layer.count)
        for layer in drawn
        for move in (*layer.activations, *(m for p in layer.parameters for m in p.moves))
    ]
    assert sum(count for _, count in moves) == len(found.redistributions)
    time_us = sum(move.time_us * count for move, count in moves)
    assert time_us == pytest.approx(sum(each.time_us for each in found.redistributions))
    names = [name for layer in drawn for name in (move.name for move in layer.activations)]
    assert not any(name.startswith("layers.") for name in names)


def test_a_way_says_where_it_begins_and_ends() -> None:
    by_hand = plan_by_hand(("dp", 2, FSDP), ("tp", 2, TENSOR_PARALLEL))
    (weight,) = drawn_layers(by_hand)[0].parameters
    unshard, reduce = weight.moves
    assert (unshard.purpose, reduce.purpose) == ("unshard", "reduce gradient")
    assert unshard.source == reduce.target == weight.tensor
    assert [(s.kind, s.axis, s.num_bytes) for s in reduce.steps] == [("reduce_scatter", "dp", 512)]
    assert unshard.may_hide
    assert weight.tensor.local_bytes == 256


def test_windows_of_equal_layers_are_one_with_the_time_of_all() -> None:
    found = plan()
    rows = list(windows_of_layers(found))
    assert sum(compute for _, _, compute, _ in rows) == pytest.approx(
        sum(window.compute_us for window in found.windows)
    )
    assert ("layers.1-3 backward", 3) in [row[:2] for row in rows]


def test_windows_and_what_none_hides_are_all_that_a_plan_costs() -> None:
    found = plan()
    in_full = times_in_full(found)
    assert any(name.startswith("parameters, in full") for name in in_full)
    hidden = sum(window.time_us for window in found.windows)
    assert hidden + sum(in_full.values()) == pytest.approx(found.objective_us)
    page = report_page(found)
    assert all(f"<div>{name}</div>" in page for name in in_full)


def test_a_part_is_a_layer_or_a_top_level_module() -> None:
    assert part_of("m.layers.3.attention.wq.weight") == "m.layers.3"
    assert part_of("norm.weight") == "norm"
    assert part_of("weight") == "the model"
