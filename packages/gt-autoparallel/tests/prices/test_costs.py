"""Prices: rooflines of local shapes, collectives by where their ranks lie, copies of reorderings."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from gt_autoparallel.graph.layouts import Layout, MeshShape, fits
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.parameter_chains import ParameterMove
from gt_autoparallel.graph.placement_graph import PlacementNode, TensorSpec, Value
from gt_autoparallel.graph.redistribution import can_redistribute, redistribution_steps
from gt_autoparallel.prices.costs import PlacementPrices, StepTime
from gt_autoparallel.problem.redistribution_tables import RedistributionTables
from gt_passes.simulation import CostModel, h100_sxm

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
NODES = MeshShape(names=("nodes", "gpus"), sizes=(8, 8))
BIG = TensorSpec(shape=(8192, 4096), stride=(4096, 1), dtype=torch.bfloat16)


def node(target: object, *args: object, output: TensorSpec = BIG) -> PlacementNode:
    return PlacementNode(
        index=2, name="n", kind="operator", target=target, args=args, outputs=(output,)
    )


def option(operands: tuple[Layout, ...], output: Layout) -> NodeOption:
    return NodeOption(operands=operands, outputs=(output,))


def test_a_sharded_product_takes_its_share_of_the_time() -> None:
    prices = PlacementPrices()
    square = TensorSpec(shape=(8192, 8192), stride=(8192, 1), dtype=torch.bfloat16)
    product = node(torch.ops.aten.mm.default, Value(0), Value(1), output=square)
    whole = prices.compute_us(product, (square, square), option(((R, R), (R, R)), (R, R)), NODES)
    part = prices.compute_us(product, (square, square), option(((R, S0), (R, R)), (R, S0)), NODES)
    assert 6.5 < whole / part < 8.5


def test_views_are_free_and_copies_are_not() -> None:
    prices = PlacementPrices()
    for target, is_free in (
        (torch.ops.aten.t.default, True),
        (torch.ops.aten.clone.default, False),
    ):
        time = prices.compute_us(node(target, Value(0)), (BIG,), option(((R, S0),), (R, S0)), NODES)
        assert (time == 0.0) is is_free


def step_us(source: Layout, target: Layout, mesh: MeshShape = NODES) -> float:
    steps = redistribution_steps(BIG.shape, source, target, mesh)
    times = (PlacementPrices().step_time(step, BIG.dtype, mesh, None) for step in steps)
    return math.fsum(time.in_full_us for time in times)


def test_an_axis_inside_a_node_is_faster_than_one_across_nodes() -> None:
    assert step_us((R, S0), (R, R)) < 0.5 * step_us((S0, R), (R, R))


def test_the_mesh_is_part_of_what_is_remembered() -> None:
    prices = PlacementPrices()
    line = MeshShape(names=("gpus", "nodes"), sizes=(8, 8))
    small = MeshShape(names=("a", "b"), sizes=(8, 1))
    for mesh in (NODES, line, small):
        (step,) = redistribution_steps(BIG.shape, (S0, R), (R, R), mesh)
        assert prices.step_time(step, BIG.dtype, mesh, None) == PlacementPrices().step_time(
            step, BIG.dtype, mesh, None
        )
    (across,) = redistribution_steps(BIG.shape, (S0, R), (R, R), NODES)
    slow, fast = (prices.step_time(across, BIG.dtype, mesh, None) for mesh in (NODES, small))
    assert slow.in_full_us > fast.in_full_us


def test_the_order_of_axes_is_not_that_of_links() -> None:
    turned = MeshShape(names=NODES.names[::-1], sizes=NODES.sizes[::-1], strides=(1, 8))
    assert step_us((S0, R), (R, R), turned) == step_us((R, S0), (R, R))


def hidden_step(source: Layout, target: Layout, move: ParameterMove | None) -> StepTime:
    (step,) = redistribution_steps(BIG.shape, source, target, NODES)
    return PlacementPrices().step_time(step, BIG.dtype, NODES, move)


@pytest.mark.parametrize(
    ("source", "target", "move"),
    [
        ((R, S0), (R, R), "unshard"),
        ((R, P), (R, S0), "reduce_grad"),
        ((R, P), (R, R), "reduce_grad"),
    ],
)
def test_what_passes_prefetch_may_hide_but_not_its_copies(source, target, move) -> None:
    alone, moved = (hidden_step(source, target, each) for each in (None, move))
    assert alone.hidden_us == 0.0
    # A bucket's latency is not each parameter's.
    assert 0.9 * alone.in_full_us < moved.hidden_us < alone.in_full_us
    assert moved.in_full_us > 0.0


@pytest.mark.parametrize(
    ("source", "target", "move"),
    [
        ((R, S0), (R, S1), "unshard"),
        ((R, S0), (R, S1), "reduce_grad"),
        ((R, S0), (R, R), "reduce_grad"),
    ],
)
def test_what_no_pass_prefetches_counts_in_full(source, target, move) -> None:
    assert hidden_step(source, target, move) == hidden_step(source, target, None)


def test_the_optimizer_takes_as_long_as_there_is_to_update() -> None:
    parameter = replace(node(None), kind="parameter")
    whole, part = (
        PlacementPrices().compute_us(parameter, (), option((), layout), NODES)
        for layout in ((R, R), (R, S0))
    )
    assert whole == pytest.approx(8 * part)


def test_gathering_an_inner_dim_pays_for_the_copy() -> None:
    copy_us = CostModel().memory_bound_cost(2 * BIG.num_bytes).duration_us
    assert math.isclose(step_us((R, S1), (R, R)), step_us((R, S0), (R, R)) + copy_us)


def test_slicing_the_first_dim_is_free() -> None:
    assert step_us((R, R), (R, S0)) == 0.0
    assert step_us((R, R), (R, S1)) > 0.0


@pytest.mark.parametrize("move", [None, "unshard", "reduce_grad"])
def test_tables_hold_the_sums_of_steps(move) -> None:
    """On a mesh of three axes, with shapes that not every layout cuts."""
    mesh = MeshShape(names=("a", "b", "c"), sizes=(2, 3, 2))
    prices = PlacementPrices()
    tables = RedistributionTables(mesh, prices)
    placements: list[Placement] = [R, P, S0, S1]
    for shape in ((12, 12), (6, 4)):
        spec = TensorSpec(shape=shape, stride=(shape[1], 1), dtype=torch.float32)
        layouts = tuple(
            layout
            for layout in itertools.product(placements, repeat=3)
            if fits(shape, layout, mesh)
        )[::3]
        table = tables.table(spec, layouts, layouts, move)
        for (i, source), (j, target) in itertools.product(enumerate(layouts), repeat=2):
            if not can_redistribute(source, target):
                assert table.in_full_us[i, j] == np.inf
                continue
            steps = redistribution_steps(shape, source, target, mesh)
            times = [prices.step_time(step, spec.dtype, mesh, move) for step in steps]
            in_full = sum(time.in_full_us for time in times)
            hidden = sum(time.hidden_us for time in times)
            assert math.isclose(table.in_full_us[i, j], in_full, abs_tol=1e-9)
            assert math.isclose(table.hidden_us[i, j], hidden, abs_tol=1e-9)


def test_the_digest_tells_machines_apart() -> None:
    slower = CostModel(h100_sxm().scaled("network", 0.5))
    assert PlacementPrices().digest == PlacementPrices().digest
    assert PlacementPrices(slower).digest != PlacementPrices().digest
