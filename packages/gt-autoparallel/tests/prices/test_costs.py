"""Prices: rooflines of local shapes, collectives by where their ranks lie, copies of reorderings."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from gt_autoparallel.graph.layouts import Layout, MeshShape, fits
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.placement_graph import PlacementNode, TensorSpec, Value
from gt_autoparallel.graph.redistribution import can_redistribute, redistribution_steps
from gt_autoparallel.prices.costs import PlacementPrices
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
    return math.fsum(PlacementPrices().step_us(step, BIG.dtype, mesh) for step in steps)


def test_an_axis_inside_a_node_is_faster_than_one_across_nodes() -> None:
    assert step_us((R, S0), (R, R)) < 0.5 * step_us((S0, R), (R, R))


def test_the_mesh_is_part_of_what_is_remembered() -> None:
    prices = PlacementPrices()
    line = MeshShape(names=("gpus", "nodes"), sizes=(8, 8))
    small = MeshShape(names=("a", "b"), sizes=(8, 1))
    for mesh in (NODES, line, small):
        (step,) = redistribution_steps(BIG.shape, (S0, R), (R, R), mesh)
        assert prices.step_us(step, BIG.dtype, mesh) == PlacementPrices().step_us(
            step, BIG.dtype, mesh
        )
    (across,) = redistribution_steps(BIG.shape, (S0, R), (R, R), NODES)
    assert prices.step_us(across, BIG.dtype, NODES) > prices.step_us(across, BIG.dtype, small)


def test_gathering_an_inner_dim_pays_for_the_copy() -> None:
    copy_us = CostModel().memory_bound_cost(2 * BIG.num_bytes).duration_us
    assert math.isclose(step_us((R, S1), (R, R)), step_us((R, S0), (R, R)) + copy_us)


def test_slicing_the_first_dim_is_free() -> None:
    assert step_us((R, R), (R, S0)) == 0.0
    assert step_us((R, R), (R, S1)) > 0.0


def test_tables_hold_the_sums_of_steps() -> None:
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
        table = tables.table(spec, layouts, layouts)
        for (i, source), (j, target) in itertools.product(enumerate(layouts), repeat=2):
            if not can_redistribute(source, target):
                assert table[i, j] == np.inf
                continue
            steps = redistribution_steps(shape, source, target, mesh)
            wanted = sum(prices.step_us(step, spec.dtype, mesh) for step in steps)
            assert math.isclose(table[i, j], wanted, abs_tol=1e-9)


def test_the_digest_tells_machines_apart() -> None:
    slower = CostModel(h100_sxm().scaled("network", 0.5))
    assert PlacementPrices().digest == PlacementPrices().digest
    assert PlacementPrices(slower).digest != PlacementPrices().digest
