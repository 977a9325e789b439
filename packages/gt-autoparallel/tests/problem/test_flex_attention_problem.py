"""FlexAttention through the planner: capture, problem, optimum, audit, plan file."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exhaustive_placements import Exhaustive
from flex_attention_samples import CASES, Attends, inputs_of, samples_of
from simulated_ranks import node_of, spec_of
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn.attention.flex_attention import flex_attention
from torch.utils import _pytree as pytree

from gt_autoparallel import (
    Constraints,
    MeshShape,
    PlacementPrices,
    PlacementRequest,
    PlanMismatchError,
    audit_plan,
    decode_plan,
    encode_plan,
    find_placement,
    load_plan,
    write_plan,
)
from gt_autoparallel._torch_internals import operator_name
from gt_autoparallel.graph.capture import capture_placement_graph
from gt_autoparallel.graph.graph_encoding import (
    canonical_json,
    decode_graph,
    encode_graph,
    graph_digest,
)
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode, Value
from gt_autoparallel.plan.placement_plan import ModelSignature, PlacementPlan
from gt_autoparallel.planner import Planner
from gt_autoparallel.problem.constraints import ResolvedRequest

TWO = MeshShape(names=("a",), sizes=(2,))
R = Replicate()


class OneAttention(nn.Module):
    """With a bias for each head, and no mask."""

    def __init__(self) -> None:
        super().__init__()
        self.of_head = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s + self.of_head[h]

        out: Any = flex_attention(x, x, x, score_mod=score)
        return out


def with_given_mask(graph: PlacementGraph) -> PlacementGraph:
    """The graph with inputs in place of what makes its mask, which has one block."""
    nodes: list[PlacementNode] = []
    moved: dict[Value, Value] = {}

    def value_of(leaf: Any) -> Any:
        if not isinstance(leaf, Value):
            return leaf
        if leaf in moved:
            return moved[leaf]
        name = f"mask_{len(nodes)}"
        spec = replace(graph.spec(leaf), shape=(1,) * len(graph.spec(leaf).shape))
        nodes.append(
            PlacementNode(index=len(nodes), name=name, kind="input", target=name, outputs=(spec,))
        )
        return Value(nodes[-1].index)

    for node in graph.nodes:
        makes_mask = node.kind in ("operator", "share") and "flex_attention" not in node.name
        if makes_mask and not node.name.startswith(("x", "of_head")):
            continue
        args, kwargs = pytree.tree_map(value_of, (node.args, node.kwargs))
        nodes.append(replace(node, index=len(nodes), args=args, kwargs=kwargs))
        for position in range(len(node.outputs)):
            moved[Value(node.index, position)] = Value(len(nodes) - 1, position)
    return replace(graph, nodes=tuple(nodes))


def test_the_optimum_is_the_best_of_all() -> None:
    captured = capture_placement_graph(OneAttention(), (torch.empty(4, 4, 512, 64),))
    graph = with_given_mask(captured)
    signature = ModelSignature(parameters={}, modules={}, graph_digest=graph_digest(graph))
    planner = Planner(graph, TWO, signature=signature)
    clustering = planner.problem(ResolvedRequest(memory_budget_bytes=2**60)).clustering
    every = Exhaustive(graph, TWO, clustering.class_of_node)
    assert 1_000 < every.num_combinations < 1_000_000
    found = every.everything()
    total, memory = np.broadcast_arrays(found.total_us, found.memory_bytes)
    possible = np.isfinite(total)
    for budget in (2**60, int(np.median(memory[possible]))):
        plan = planner.find(memory_budget_bytes=budget)
        best = total[possible & (memory <= budget)].min()
        assert math.isclose(plan.objective_us, best, rel_tol=1e-9)
        assert plan.solver.proven
        assert audit_plan(plan).relative_error < 1e-9


def plan_of(name: str, mesh: MeshShape, layout: Any) -> PlacementPlan:
    model, inputs = Attends(CASES[name]), inputs_of(CASES[name])
    request = PlacementRequest(
        constraints=Constraints(inputs={"q": layout}, outputs={"output": layout})
    )
    return find_placement(model, mesh, inputs, request)


def test_what_a_function_forbids_to_cut_is_said_when_planned() -> None:
    """Where samples cannot be cut, attention runs whole on every rank: right, and dear."""
    reason = (
        "flex_attention and 1 more: cannot be cut along samples, for its scores or mask do more with "
        "their numbers than to look them up in tensors that are cut likewise"
    )
    with pytest.warns(UserWarning, match=f"^{reason}$"):
        plan = plan_of("number of the sample", TWO, [Shard(0)])
    (attention,) = [n for n in plan.graph.nodes if n.name.endswith("flex_attention")]
    assert plan.options[attention.index].operands[0] != (Shard(0),)
    assert audit_plan(plan).relative_error < 1e-6


def test_a_plan_is_audited_and_comes_back_from_a_file() -> None:
    plan = plan_of("learned bias", TWO, [Shard(1)])
    assert audit_plan(plan).relative_error < 1e-6
    content = json.loads(json.dumps(encode_plan(plan)))
    loaded = decode_plan(content, PlacementPrices())
    assert loaded.graph.nodes == plan.graph.nodes
    assert loaded.options == plan.options
    assert audit_plan(loaded).total_us == audit_plan(plan).total_us


def test_a_plan_file_is_loaded_for_the_model_and_refused_for_another_mask(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(plan_of("documents", TWO, [Shard(0)]), path)
    model = Attends(CASES["documents"])
    loaded = load_plan(path, model, TWO, inputs_of(CASES["documents"]))
    assert loaded.graph.interface is not None
    names = [leaf.name for leaf in loaded.graph.interface.inputs if leaf.node is not None]
    assert names[3] == "mask.kv_num_blocks"
    assert names[-1] == "mask._closure_0"
    *others, _ = inputs_of(CASES["documents"])
    with pytest.raises(PlanMismatchError):
        load_plan(path, model, TWO, (*others, CASES["number of the sample"].mask()))


def test_a_graph_comes_back_with_its_functions_and_its_digest_knows_them() -> None:
    model, inputs = Attends(CASES["learned bias"]), inputs_of(CASES["learned bias"])
    graph = capture_placement_graph(model, inputs)
    written = canonical_json(encode_graph(graph))
    again = decode_graph(json.loads(written))
    assert again == graph
    assert canonical_json(encode_graph(again)) == written
    (node,) = [n for n in graph.nodes if operator_name(n.target) == "higher_order.flex_attention"]
    function = node.args[3]
    steps = (*function.steps[:-1], replace(function.steps[-1], args=function.steps[0].args))
    args = (*node.args[:3], replace(function, steps=steps), *node.args[4:])
    changed = replace(node, args=args)
    nodes = tuple(changed if each is node else each for each in graph.nodes)
    assert graph_digest(replace(graph, nodes=nodes)) != graph_digest(graph)


def test_a_shard_costs_its_share_of_the_scores() -> None:
    """Block-sparse attention is priced as the dry run prices it, at local shapes."""
    forward, backward = samples_of("documents")
    for sample in (forward, backward):
        node, operands, _ = node_of(sample)
        big = _larger(tuple(spec_of(operand) for operand in operands))
        outputs = tuple(None if spec is None else _larger((spec,))[0] for spec in node.outputs)
        node = replace(node, outputs=outputs)
        whole = NodeOption(operands=((R,),) * len(big), outputs=((R,),) * len(outputs))
        queries = [position for position, spec in enumerate(big) if len(spec.shape) == 4][:3]
        layouts = [(Shard(1),) if position in queries else (R,) for position in range(len(big))]
        part = replace(whole, operands=tuple(layouts))
        prices = PlacementPrices()
        times = [prices.compute_us(node, big, option, TWO) for option in (whole, part)]
        assert 1.7 < times[0] / times[1] < 2.1


def _larger(specs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        replace(spec, shape=(*spec.shape[:2], 4096, 128), stride=(2**22, 2**20, 128, 1))
        if len(spec.shape) == 4 and spec.dtype.is_floating_point
        else spec
        for spec in specs
    )
