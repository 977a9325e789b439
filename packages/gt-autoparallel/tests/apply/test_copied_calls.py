"""Placed models captured with copied calls: the same graph, node by node."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from placed_model_cases import (
    Block,
    Decoder,
    batch,
    decoder,
    local_arguments,
    mesh_2d,
    step_of,
)
from random_plans import plan_of, random_plan
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from gt_autoparallel import Constraints, PlacementPlan, PlacementRequest, find_placement
from gt_autoparallel.apply import apply_plan
from gt_autoparallel.graph.capture import capture_placement_graph
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.prices.recomputability import recomputable_nodes
from gt_trace.stamping import CopyReport, trace_step_by_copying
from gt_trace.testing import fake_world

NUM_LAYERS = 6


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_world(rank=3, world_size=4):
        yield mesh_2d()


def compared(model: nn.Module, plan: PlacementPlan, mesh: DeviceMesh) -> CopyReport:
    """The report of a capture that equals the full one."""
    apply_plan(model, plan, mesh)
    trace = trace_step_by_copying(step_of(model), module=model, compare=True)
    return trace(*local_arguments(plan, mesh)).report


def test_random_plans_are_captured_as_in_full(mesh: DeviceMesh) -> None:
    tokens, positions = batch()
    graph = capture_placement_graph(decoder(), (tokens,), {"positions": positions})
    for seed in range(2):
        model = decoder()
        plan = random_plan(model, graph, MeshShape.of(mesh), seed=seed, recomputes=seed % 2 == 0)
        assert compared(model, plan, mesh).compared


def deep_decoder() -> Decoder:
    torch.manual_seed(3)
    model = Decoder()
    model.layers = nn.ModuleList([Block() for _ in range(NUM_LAYERS)])
    return model


def planned(mesh: DeviceMesh) -> PlacementPlan:
    """A plan of which some layers recompute something, and others something else."""
    tokens, positions = batch()
    request = PlacementRequest(
        constraints=Constraints(inputs={"*": (Shard(0), Shard(0))}),
        memory_budget_bytes=None,
        relative_gap=0.1,
    )
    shape = MeshShape.of(mesh)
    model = deep_decoder()
    found = find_placement(
        model, shape, (tokens,), request, example_kwargs={"positions": positions}
    )
    draw = random.Random(5)
    again = [index for index in sorted(recomputable_nodes(found.graph)) if draw.random() < 0.3]
    return plan_of(model, found.graph, shape, found.options, again)


def test_layers_of_which_some_recompute_are_captured_as_in_full(mesh: DeviceMesh) -> None:
    plan = planned(mesh)
    assert plan.recomputed
    report = compared(deep_decoder(), plan, mesh)
    assert report.num_copied > report.num_calls / 2
