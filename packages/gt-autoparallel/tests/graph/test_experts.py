"""Routed experts: captured as one node each way, with few options, priced at balanced routing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from gt_autoparallel.errors import ConstraintError, PlacementInputError
from gt_autoparallel.expert_table import expert_plans
from gt_autoparallel.explanation import explain
from gt_autoparallel.find import PlacementRequest, find_placement, planner_of_model
from gt_autoparallel.graph.capture import capture_placement_graph
from gt_autoparallel.graph.experts import expert_parallel_axes, opaque_experts
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode, TensorSpec
from gt_autoparallel.plan.comparison import compare
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.plan.prediction import predicted_collectives
from gt_autoparallel.planner import Planner
from gt_autoparallel.prices.experts import (
    experts_exchanged_bytes,
    experts_inner_bytes,
    experts_local_rows,
    experts_saved_bytes,
)
from gt_autoparallel.problem.axis_styles import expert_styles, pinned_constraints
from gt_autoparallel.problem.constraints import Constraints, WantedLayout
from gt_autoparallel.rules.experts import expert_options

BATCH, LENGTH, WIDTH, HIDDEN, NUM_EXPERTS, TOP_K = 4, 6, 8, 16, 4, 2


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(NUM_EXPERTS, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.empty(NUM_EXPERTS, HIDDEN, WIDTH))

    def forward(self, *routed: torch.Tensor) -> torch.Tensor:
        raise AssertionError("planned, and not called")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, ids = torch.topk(self.router(x).sigmoid(), TOP_K)
        chosen = torch.zeros(BATCH, LENGTH, NUM_EXPERTS, dtype=torch.bool).scatter(-1, ids, True)
        return x + self.experts(x, scores, ids, chosen.sum(dim=(0, 1)))


@dataclass(frozen=True)
class Block:
    module: nn.Module
    weight_names: tuple[str, ...] = ("up", "down")
    hidden_dims: tuple[int, ...] = (2, 1)

    def run(
        self,
        tokens: torch.Tensor,
        scores: torch.Tensor,
        expert_ids: torch.Tensor,
        token_counts: torch.Tensor,
        weights: Sequence[torch.Tensor],
        *,
        expert_mesh: DeviceMesh | None,
        again: bool,
    ) -> torch.Tensor:
        raise AssertionError("planned, and not run")


@pytest.fixture(scope="module")
def graph() -> PlacementGraph:
    model = Layer().to("meta")
    with opaque_experts(model, {"experts": Block(model.experts)}):
        captured = capture_placement_graph(model, (torch.empty(BATCH, LENGTH, WIDTH),))
    assert "forward" not in vars(model.experts)
    return captured


def node_of(graph: PlacementGraph, phase: str) -> tuple[PlacementNode, tuple[TensorSpec, ...]]:
    (node,) = (n for n in graph.of_kind("experts") if n.phase == phase)
    return node, tuple(graph.spec(value) for value in node.operands)


def options_of(graph: PlacementGraph, phase: str, mesh: MeshShape) -> tuple[NodeOption, ...]:
    node, operands = node_of(graph, phase)
    return expert_options(node, operands, mesh)


LINE = MeshShape(names=("ep",), sizes=(2,))


def test_captures_one_node_each_way(graph: PlacementGraph) -> None:
    forward, operands = node_of(graph, "forward")
    assert forward.target == "experts"
    assert [spec.shape for spec in operands] == [
        (BATCH, LENGTH, WIDTH),
        (BATCH, LENGTH, TOP_K),
        (BATCH, LENGTH, TOP_K),
        (NUM_EXPERTS,),
        (NUM_EXPERTS, WIDTH, HIDDEN),
        (NUM_EXPERTS, HIDDEN, WIDTH),
    ]
    backward, _ = node_of(graph, "backward")
    assert [spec.shape for spec in backward.outputs if spec is not None] == [
        (BATCH, LENGTH, WIDTH),
        (BATCH, LENGTH, TOP_K),
        (NUM_EXPERTS, WIDTH, HIDDEN),
        (NUM_EXPERTS, HIDDEN, WIDTH),
    ]


def test_options_are_replicated_own_tokens_tensor_and_expert_parallel(
    graph: PlacementGraph,
) -> None:
    r, s0, s1, s2, p = (Replicate(),), (Shard(0),), (Shard(1),), (Shard(2),), (Partial("sum"),)
    forward = [(o.operands, o.outputs) for o in options_of(graph, "forward", LINE)]
    assert forward == [
        ((r, r, r, r, r, r), (r,)),
        ((r, r, r, r, s2, s1), (p,)),
        ((s0, s0, s0, p, r, r), (s0,)),
        ((s0, s0, s0, p, s0, s0), (s0,)),
        ((s1, s1, s1, p, r, r), (s1,)),
        ((s1, s1, s1, p, s0, s0), (s1,)),
    ]
    backward = [(o.operands, o.outputs) for o in options_of(graph, "backward", LINE)]
    assert backward == [
        ((r, r, r, r, r, r, r), (r, r, r, r)),
        ((r, r, r, r, r, s2, s1), (p, p, s2, s1)),
        ((s0, s0, s0, s0, p, r, r), (s0, s0, p, p)),
        ((s0, s0, s0, s0, p, s0, s0), (s0, s0, s0, s0)),
        ((s1, s1, s1, s1, p, r, r), (s1, s1, p, p)),
        ((s1, s1, s1, s1, p, s0, s0), (s1, s1, s0, s0)),
    ]


@pytest.mark.parametrize(("strides", "together"), [((2, 1), {(0, 1)}), ((1, 2), set())])
def test_axes_are_expert_parallel_together_if_ranks_are_in_the_order_of_their_experts(
    graph: PlacementGraph, strides: tuple[int, int], together: set[tuple[int, ...]]
) -> None:
    node, operands = node_of(graph, "forward")
    square = MeshShape(names=("data", "ep"), sizes=(2, 2), strides=strides)
    by_axes = {expert_parallel_axes(node, o): o for o in options_of(graph, "forward", square)}
    assert set(by_axes) == {(), (0,), (1,), *together}
    if together:
        option = by_axes[0, 1]
        rows = BATCH * LENGTH * TOP_K // 4
        assert experts_local_rows(node, operands, option, square) == rows
        assert square.ranks_of_axes((0, 1)) == (0, 1, 2, 3)


def test_experts_whose_block_takes_no_parts_of_features_are_not_tensor_parallel() -> None:
    model = Layer().to("meta")
    with opaque_experts(model, {"experts": Block(model.experts, hidden_dims=())}):
        graph = capture_placement_graph(model, (torch.empty(BATCH, LENGTH, WIDTH),))
    weights = {option.operands[4] for option in options_of(graph, "forward", LINE)}
    assert weights == {(Replicate(),), (Shard(0),)}


def test_a_part_of_the_features_is_computed_and_kept(graph: PlacementGraph) -> None:
    node, operands = node_of(graph, "forward")
    whole, cut, *_ = options_of(graph, "forward", LINE)
    rows = BATCH * LENGTH * TOP_K
    assert experts_local_rows(node, operands, cut, LINE) == rows
    assert experts_exchanged_bytes(node, operands, cut, LINE) == ()
    saved = [experts_saved_bytes(node, operands, each, LINE) for each in (whole, cut)]
    # Tokens and results are whole, and of three values of HIDDEN features there is half.
    assert saved[0] - saved[1] == rows * 3 * HIDDEN // 2 * 4


def test_experts_that_do_not_divide_are_not_expert_parallel(graph: PlacementGraph) -> None:
    node, _ = node_of(graph, "forward")
    options = options_of(graph, "forward", MeshShape(names=("ep",), sizes=(6,)))
    # Six ranks divide the sequence, and neither the batch nor the experts.
    assert [expert_parallel_axes(node, option) for option in options] == [(), ()]


def test_prices_are_those_of_balanced_routing(graph: PlacementGraph) -> None:
    forward, operands = node_of(graph, "forward")
    replicated, _, _, parallel, *_ = options_of(graph, "forward", LINE)
    rows = BATCH * LENGTH * TOP_K
    assert experts_local_rows(forward, operands, replicated, LINE) == rows
    assert experts_local_rows(forward, operands, parallel, LINE) == rows // 2
    assert experts_exchanged_bytes(forward, operands, replicated, LINE) == ()
    exchanged = rows // 2 * WIDTH * 4
    assert experts_exchanged_bytes(forward, operands, parallel, LINE) == (
        NUM_EXPERTS * 8,
        exchanged,
        exchanged,
    )
    backward, gradients = node_of(graph, "backward")
    _, _, _, parallel_backward, *_ = options_of(graph, "backward", LINE)
    assert experts_local_rows(backward, gradients, parallel_backward, LINE) == rows // 2
    assert experts_exchanged_bytes(backward, gradients, parallel_backward, LINE) == (
        exchanged,
        exchanged,
    )
    assert experts_saved_bytes(backward, gradients, parallel_backward, LINE) == 0
    assert experts_saved_bytes(forward, operands, parallel, LINE) > 2 * exchanged


@pytest.fixture(scope="module")
def planner() -> Planner:
    model = Layer().to("meta")
    blocks = {"experts": Block(model.experts)}
    return planner_of_model(model, LINE, (torch.empty(BATCH, LENGTH, WIDTH),), experts=blocks)


def axes_of_experts(plan: PlacementPlan) -> set[tuple[int, ...]]:
    nodes = plan.graph.of_kind("experts")
    assert len(nodes) == 2
    return {expert_parallel_axes(node, plan.options[node.index]) for node in nodes}


@pytest.mark.parametrize("name", ["experts", "*"])
def test_a_constraint_distributes_experts_over_an_axis(planner: Planner, name: str) -> None:
    # So few tokens are cheapest where they are.
    assert axes_of_experts(planner.find()) == {()}
    wanted = Constraints(experts={name: {"ep": Shard(0)}})
    assert axes_of_experts(planner.find(constraints=wanted)) == {(0,)}


def test_a_constraint_keeps_tokens_where_they_are(planner: Planner) -> None:
    # All else being distributed, experts are only kept whole because that is demanded.
    shards: WantedLayout = [Shard(0)]
    elsewhere = {"parameters": {"experts.*": shards}, "inputs": {"*": shards}}
    plan = planner.find(constraints=Constraints(**elsewhere, experts={"*": [Replicate()]}))
    assert axes_of_experts(plan) == {()}
    assert plan.parameter_layouts()["experts.up"] == (Shard(0),)


def test_says_what_it_would_cost_to_distribute_experts_and_shows_it_in_comparisons(
    planner: Planner,
) -> None:
    plan = planner.find()
    found = explain(plan, "experts", planner=planner)
    assert found.name == "weights in experts/experts"
    assert found.layout == (Replicate(),)
    (alternative,) = (each for each in found.alternatives if each.layout == (Shard(0),))
    assert {each.layout for each in found.alternatives} == {(Shard(0),), (Shard(2),)}
    distributed = planner.find(constraints=Constraints(experts={"*": [Shard(0)]}))
    assert alternative.at_most_us == pytest.approx(distributed.objective_us - plan.objective_us)
    changed = {each.name: (each.first, each.second) for each in compare(plan, distributed).nodes}
    assert changed["experts/experts weights"] == ("R", "S(0)")


def test_experts_plans_distribute_routed_experts(planner: Planner) -> None:
    plans = {each.name: each.plan for each in expert_plans(planner)}
    assert list(plans) == ["DDP", "FSDP", "DDP + EP", "FSDP + EP", "TP", "TP + SP"]
    whole, shard = (Replicate(),), (Shard(0),)
    stored = {"DDP": (whole, whole), "FSDP": (shard, shard)}
    stored |= {"DDP + EP": (whole, shard), "FSDP + EP": (shard, shard)}
    for name, (of_router, of_experts) in stored.items():
        plan = plans[name]
        assert plan is not None
        assert axes_of_experts(plan) == ({(0,)} if "EP" in name else {()})
        layouts = plan.parameter_layouts()
        assert layouts["router.weight"] == of_router
        assert layouts["experts.up"] == layouts["experts.down"] == of_experts
        gathered = {c.parameter for c in predicted_collectives(plan) if c.purpose == "unshard"}
        assert ("router.weight" in gathered) == ("FSDP" in name)
        assert ("experts.up" in gathered) == (name == "FSDP")


def test_experts_that_are_heavy_to_move_are_distributed_though_nobody_asks() -> None:
    model, wide = Layer().to("meta"), 2**20
    model.experts.up = nn.Parameter(torch.empty(NUM_EXPERTS, WIDTH, wide, device="meta"))
    model.experts.down = nn.Parameter(torch.empty(NUM_EXPERTS, wide, WIDTH, device="meta"))
    # Parts of their features would not have to move either.
    blocks = {"experts": Block(model.experts, hidden_dims=())}
    x = torch.empty(BATCH, LENGTH, WIDTH)
    plan = find_placement(
        model,
        LINE,
        (x,),
        PlacementRequest(
            experts=blocks,
            constraints=Constraints(inputs={"*": [Shard(0)]}, outputs={"*": [Shard(0)]}),
        ),
    )
    assert axes_of_experts(plan) == {(0,)}
    exchanges = [c for c in predicted_collectives(plan) if c.purpose == "token exchange"]
    # Counts, rows and results; the gradients of both.
    rows = BATCH * LENGTH * TOP_K // 2 * WIDTH * 4
    assert [c.num_bytes for c in exchanges] == [NUM_EXPERTS * 8, rows, rows, rows, rows]


def test_distributed_experts_are_cut_further_by_fsdp(graph: PlacementGraph) -> None:
    square = MeshShape(names=("data", "ep"), sizes=(2, 2))
    styles = expert_styles(square, routed_experts=True)["FSDP + EP"]
    assert styles == {"data": "fsdp", "ep": "fsdp+ep"}
    of_node = {
        (pin.node, pin.side): pin.placements for pin in pinned_constraints(graph, square, styles)
    }
    assert of_node["experts.up", "output"] == (Shard(1), Shard(0))
    assert of_node["experts.up/share", "output"] == (Replicate(), Shard(0))
    assert of_node["experts/experts", "operand"] == (Replicate(), Shard(0))
    assert of_node["router.weight", "output"] == (Shard(0), Shard(0))
    assert of_node["router.weight/share", "output"] == (Replicate(), Replicate())


def test_refuses_demands_on_experts_that_are_not_there_or_not_cut_so(planner: Planner) -> None:
    with pytest.raises(ConstraintError) as error:
        planner.find(constraints=Constraints(experts={"expert": [Shard(0)]}))
    assert str(error.value) == (
        "constraints:\n  experts['expert']: there is none; there are ['experts']"
    )
    with pytest.raises(ConstraintError) as error:
        planner.find(constraints=Constraints(experts={"*": [Shard(1)]}))
    assert str(error.value) == (
        "constraints:\n  node 'experts/experts' has no option with operand 4 in (S(1))"
    )


def test_refuses_blocks_that_are_not_the_models() -> None:
    model = Layer()
    with (
        pytest.raises(PlacementInputError, match=r"expert blocks \['moe'\] are not modules"),
        opaque_experts(model, {"moe": Block(model.experts)}),
    ):
        pass


@pytest.mark.parametrize("operator", ["experts", "experts_backward"])
def test_experts_that_are_not_placed_say_so(operator: str):
    x = torch.ones(1)
    arguments = [x, x, x, x, [x], [1], "layers.0.experts"]
    call = getattr(torch.ops.gt_autoparallel, operator)
    message = r"^the experts of layers\.0\.experts are planned, and run only when placed$"
    with pytest.raises(NotImplementedError, match=message):
        call(*([x] if operator == "experts_backward" else []), *arguments)


NUM_LAYERS = 4


@pytest.fixture(scope="module")
def deep_planner() -> Planner:
    model = nn.Module()
    model.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
    model.forward = lambda x: _through(model.layers, x)
    model.to("meta")
    blocks = {f"layers.{i}.experts": Block(model.layers[i].experts) for i in range(NUM_LAYERS)}
    return planner_of_model(model, LINE, (torch.empty(BATCH, LENGTH, WIDTH),), experts=blocks)


def _through(layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


@pytest.mark.parametrize("experts", [[Replicate()], [Shard(0)]], ids=["own tokens", "distributed"])
def test_under_a_budget_some_layers_run_their_experts_again_in_the_backward(
    deep_planner: Planner, experts: WantedLayout
) -> None:
    wanted = Constraints(inputs={"*": [Shard(0)]}, experts={"*": experts})
    free = deep_planner.find(constraints=wanted)
    assert free.recomputed == ()
    nodes = free.graph.of_kind("experts")
    inner = {
        each.index: experts_inner_bytes(
            each, free.graph.operand_specs(each), free.options[each.index], LINE
        )
        for each in nodes
    }
    (bytes_of_layer,) = set(inner.values())
    forward = {each.index for each in nodes if each.phase == "forward"}
    # Less than what gathering weights again would save.
    less = free.memory.total - 2 * bytes_of_layer
    tight = deep_planner.find(constraints=wanted, memory_budget_bytes=less, relative_gap=1e-3)
    backward = {each.index for each in nodes} - forward
    again = forward.intersection(tight.recomputed)
    thinned = backward.intersection(tight.recomputed)
    assert again or thinned
    assert tight.memory.total <= less
    assert tight.objective_us > free.objective_us

    def exchanges(plan: PlacementPlan, phase: str) -> int:
        return sum(
            each.purpose == "token exchange" and each.phase == phase
            for each in predicted_collectives(plan)
        )

    for phase, more in (("forward", 0), ("backward", 2 * len(again))):
        is_distributed = experts == [Shard(0)]
        assert exchanges(tight, phase) - exchanges(free, phase) == more * is_distributed
