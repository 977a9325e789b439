"""The planner's optimum is the best of all placements, and audited, every time."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from exhaustive_placements import Exhaustive
from random_graphs import random_graph, viewing_layers
from torch.distributed.tensor import Replicate, Shard

from gt_autoparallel.errors import InfeasiblePlacementError
from gt_autoparallel.graph.graph_encoding import graph_digest
from gt_autoparallel.graph.layouts import Layout, MeshShape
from gt_autoparallel.graph.placement_graph import PlacementGraph
from gt_autoparallel.plan.placement_plan import ModelSignature
from gt_autoparallel.planner import Planner
from gt_autoparallel.problem.clustering import cluster_layers
from gt_autoparallel.problem.constraints import LayoutConstraint, ResolvedRequest

LINE = MeshShape(names=("a",), sizes=(2,))
SQUARE = MeshShape(names=("a", "b"), sizes=(8, 2))
MAX_COMBINATIONS = 200_000


def signature_of(graph: PlacementGraph) -> ModelSignature:
    return ModelSignature(parameters={}, modules={}, graph_digest=graph_digest(graph))


def planner_of(seed: int, mesh: MeshShape) -> tuple[Planner, Exhaustive, random.Random, list[str]]:
    """For the first graph of the seed that is small enough to try everything; the rows of bytes."""
    rng = random.Random(seed)
    for attempt in range(100):
        largest = 4 if mesh is LINE else 2
        num_layers = rng.choice((0, 1, 2, 3))
        num_operators = max(1, rng.randint(1, largest) - attempt // 20 - (num_layers > 0))
        graph = random_graph(rng, num_operators=num_operators, num_layers=num_layers)
        # Of losses some are larger than what any layer computes again, some smaller.
        of_step: dict[str, Any] = {
            "loss_bytes": (0, 0, 300, 3000)[seed % 4],
            "accumulates_gradients": seed % 3 == 0,
        }
        planner = Planner(
            graph,
            mesh,
            signature=signature_of(graph),
            **of_step,
        )
        budgeted = planner.problem(ResolvedRequest(memory_budget_bytes=2**60, **of_step))
        every = Exhaustive(graph, mesh, budgeted.clustering.class_of_node, **of_step)
        if every.num_combinations * 2 ** len(every.recomputable()) <= MAX_COMBINATIONS:
            return planner, every, rng, [row.name for row in budgeted.problem.memory]
    raise AssertionError("no small graph")


def constraints_of(
    graph: PlacementGraph, pinned: Mapping[str, Layout]
) -> tuple[LayoutConstraint, ...]:
    """Each node's first result as pinned; what has none takes its first operand so."""
    return tuple(
        LayoutConstraint(
            node=node.name,
            side="output" if node.outputs else "operand",
            position=0,
            placements=pinned[node.name],
        )
        for node in graph.nodes
        if node.name in pinned
    )


@pytest.mark.parametrize(
    ("mesh", "block"),
    [*((LINE, block) for block in range(8)), *((SQUARE, block) for block in range(2))],
    ids=lambda value: f"{value.num_axes}-D" if isinstance(value, MeshShape) else str(value),
)
def test_the_optimum_is_the_best_of_all(mesh: MeshShape, block: int) -> None:
    """210 graphs in all."""
    for seed in range(21 * block, 21 * block + 21):
        planner, every, rng, rows = planner_of(seed, mesh)
        walks = [
            np.broadcast_arrays(each.total_us, each.memory_bytes)
            for each in every.everything_and_again()
        ]
        total, memory = (np.concatenate([np.ravel(walk[i]) for walk in walks]) for i in (0, 1))
        possible = np.isfinite(total)
        lowest, highest = memory[possible].min(), memory[possible].max()
        budget = round(lowest + rng.random() * (highest - lowest) * 0.7)
        best = total[possible & (memory <= budget)].min()
        plan = planner.find(memory_budget_bytes=budget)
        assert math.isclose(plan.objective_us, best, rel_tol=1e-9), seed
        assert plan.memory.total <= budget, seed
        if seed % 3 == 0:
            with pytest.raises(InfeasiblePlacementError) as error:
                planner.find(memory_budget_bytes=int(lowest) - 1)
            (least,) = re.findall("no placement takes less than ([0-9,]+) bytes", str(error.value))
            least_bytes = int(least.replace(",", ""))
            # Each row of bytes has its least value; together they may take more.
            assert least_bytes == lowest if len(rows) == 1 else least_bytes <= lowest, seed


def test_as_many_bytes_are_enough_as_the_best_of_all_takes() -> None:
    """Of two and three layers with gradients, of which a few classes are free, the others pinned."""
    tried = in_turn = to_come = 0
    for seed in range(120):
        rng = random.Random(seed)
        num_operators = rng.randint(1, 2)
        num_layers = rng.choice((2, 3))
        runs = rng.sample(range(num_layers), num_layers)  # layers need not run as they are called
        graph = random_graph(rng, num_operators=num_operators, num_layers=num_layers, runs=runs)
        of_step: dict[str, Any] = {"accumulates_gradients": seed % 3 == 0}
        planner = Planner(graph, LINE, signature=signature_of(graph), **of_step)
        unlimited = planner.find()
        request = ResolvedRequest(memory_budget_bytes=2**60, **of_step)
        classes = planner.problem(request).clustering.class_of_node
        free = {*rng.sample(sorted({*classes}), 4)}
        taken = {node.name: unlimited.options[node.index] for node in graph.nodes}
        pinned: dict[str, Layout] = {
            node.name: (taken[node.name].outputs or taken[node.name].operands)[0]  # type: ignore[misc]  # the first is a tensor
            for node in graph.nodes
            if classes[node.index] not in free
        }
        constraints = constraints_of(graph, pinned)
        request = replace(request, constraints=constraints)
        classes = planner.problem(request).clustering.class_of_node
        every = Exhaustive(graph, LINE, classes, pinned=pinned, **of_step)
        num_sets = 2 ** len(every.recomputable())
        if not graph.of_kind("gradient") or every.num_combinations * num_sets > MAX_COMBINATIONS:
            continue
        walks = [
            np.broadcast_arrays(each.total_us, each.memory_bytes)
            for each in every.everything_and_again()
        ]
        total, memory = (np.concatenate([np.ravel(walk[i]) for walk in walks]) for i in (0, 1))
        total, memory = total[np.isfinite(total)], memory[np.isfinite(total)]
        order = np.lexsort((total, memory))
        cheapest = np.minimum.accumulate(total[order])
        unbeaten = order[np.flatnonzero(np.diff(cheapest, prepend=np.inf) < -1e-9)]
        for index in {unbeaten[0], unbeaten[len(unbeaten) // 2]}:
            plan = planner.find(constraints=constraints, memory_budget_bytes=int(memory[index]))
            # Rows that count more than the moments take would leave nothing as cheap.
            assert plan.objective_us <= total[index] * (1 + 1e-9), seed
            again = {classes[node] for node in plan.recomputed}
            assert every.memory_of(plan.options, frozenset(again)) == plan.memory.total, seed
            tried += 1
            in_turn += plan.memory.let_go_in_backward > 0
            to_come += plan.memory.to_come_in_backward > 0
    assert tried > 20
    assert min(in_turn, to_come) > 3


def test_a_view_is_let_go_with_its_layer_if_it_was_moved_and_with_the_one_it_views_if_not() -> None:
    graph = viewing_layers(2)
    names = [node.name for node in graph.nodes]
    whole = [name for name in names if ".w" in name] + names[-1:]
    pinned: dict[str, Layout] = dict.fromkeys(whole, (Replicate(),))
    pinned |= dict.fromkeys(("x", "output", "output/tangent"), (Shard(0),))
    pinned |= dict.fromkeys(("layers.0/2", "layers.0/2/0/share"), (Shard(1),))
    request = ResolvedRequest(
        memory_budget_bytes=2**60,
        recomputes=False,
        constraints=constraints_of(graph, pinned),
    )
    planner = Planner(graph, LINE, signature=signature_of(graph))
    class_of_node = planner.problem(request).clustering.class_of_node
    every = Exhaustive(graph, LINE, class_of_node, pinned=pinned)
    assert every.num_combinations <= MAX_COMBINATIONS
    found = every.everything()
    total, memory = np.broadcast_arrays(found.total_us, found.memory_bytes)
    possible = np.isfinite(total)
    most = planner.find(constraints=request.constraints).memory
    assert most.total == sum(most.at_reduction.values()) > sum(most.in_backward.values())
    let_go = set()
    for share in (1.0, 0.93, 0.9):
        budget = round(share * most.total) - 1
        plan = planner.find(
            constraints=request.constraints, memory_budget_bytes=budget, recomputes=False
        )
        best = total[possible & (memory <= budget)].min()
        assert math.isclose(plan.objective_us, best, rel_tol=1e-9), share
        let_go.add(plan.memory.let_go_at_reduction)
    assert len(let_go) > 1


def test_the_graphs_have_what_makes_placement_hard() -> None:
    """Layers that share choices, values read twice by one node, several outputs, saved views."""
    layers = twice = several = gradients = recomputed = losses = reductions = fullest = 0
    for seed in range(42):
        planner, every, _, rows = planner_of(seed, LINE)
        graph = planner.graph
        classes = cluster_layers(graph).members
        layers += any(len(members) > 1 for members in classes)
        twice += any(len(n.operands) > len(set(n.operands)) for n in graph.nodes)
        several += any(len(node.outputs) > 1 for node in graph.nodes)
        gradients += bool(graph.of_kind("gradient"))
        recomputed += bool(every.recomputable())
        losses += "loss" in rows
        if any(row.endswith(", reduction") for row in rows):
            reductions += 1
            memory = planner.find().memory
            others = (memory.in_backward, memory.at_loss)
            fullest += memory.total > max(sum(parts.values()) for parts in others)
    assert min(layers, twice, several, gradients, recomputed, losses, reductions) >= 5
    assert fullest > 0
