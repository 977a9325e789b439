"""What a planner is asked for is kept, or refused with the reason; asking again is cheap."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_models import Stack
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn import functional as F

from gt_autoparallel.errors import (
    ConstraintError,
    DearPlacementError,
    InfeasiblePlacementError,
    OpenSearchWarning,
    OutOfTimeError,
    PlacementInputError,
    UnsupportedModelError,
)
from gt_autoparallel.find import (
    PlacementRequest,
    find_placement,
    find_with,
    planner_of_model,
    warn_if_open,
)
from gt_autoparallel.graph.layer_names import window_name
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.plan_file import read_plan, write_plan
from gt_autoparallel.planner import Planner
from gt_autoparallel.prices.saved_storages import saved_storages
from gt_autoparallel.problem.constraints import (
    Constraints,
    ModuleOutput,
    ResolvedRequest,
    resolve_constraints,
)
from gt_autoparallel.problem.infeasible_requests import explained
from gt_autoparallel.solver import MemoryBudgetError, Solution, WarmStart, solve
from gt_autoparallel.solver.mixed_search import MixedSolution
from gt_autoparallel.solver.solution import MemoryShortage

R, S0, S1 = Replicate(), Shard(0), Shard(1)
MESH = MeshShape(names=("data",), sizes=(4,))
TOKENS = torch.empty(8, 16, dtype=torch.int64, device="meta")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList([Block() for _ in range(5)])
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return []


@pytest.fixture(scope="module")
def planner(lines: list[str]) -> Planner:
    return planner_of_model(Model().to("meta"), MESH, (TOKENS,), progress=lines.append)


def test_repeated_layers_share_choices(planner: Planner) -> None:
    placement = planner.problem(ResolvedRequest())
    clustering = placement.clustering
    sizes = dict(zip(clustering.window_names, clustering.window_sizes, strict=True))
    assert sizes["layers.1 forward"] == sizes["layers.1 backward"] == 3
    assert sizes["layers.0 forward"] == sizes["layers.4 backward"] == 1
    for members in clustering.members:
        nodes = [planner.graph.nodes[index] for index in members]
        layer = [re.sub(r"layers\.\d+", "layers.*", node.name) for node in nodes]
        assert len(set(layer)) == 1
        assert len({(node.kind, node.outputs, node.phase) for node in nodes}) == 1
        assert len({window_name(node) for node in nodes}) == len(nodes)


def test_edges_between_alike_layers_are_priced(planner: Planner) -> None:
    """From the last node of a layer to the first of the next one, as often as that happens."""
    placement = planner.problem(ResolvedRequest())
    classes = placement.clustering.class_of_node
    nodes = planner.graph.nodes
    between = [
        use
        for use in planner.graph.uses
        if nodes[use.value.node].module.startswith("layers.2")
        and nodes[use.consumer].module.startswith("layers.3")
    ]
    assert between
    pairs = {(edge.left, edge.right) for edge in placement.problem.edges}
    for use in between:
        left, right = classes[use.value.node], classes[use.consumer]
        assert len(placement.clustering.members[left]) == 3
        assert (left, right) in pairs


def test_constraints_of_every_kind_are_kept(planner: Planner) -> None:
    plan = planner.find(
        constraints=Constraints(
            inputs={"tokens": (S0,)},
            outputs={"output": {"data": Shard(2)}},
            parameters={"layers.*.up.weight": (S1,), "head.weight": (R,)},
            nodes={"layers.2.up": (R,), "layers.3": ModuleOutput(layout=(S1,), phase="backward")},
        )
    )
    layouts = plan.parameter_layouts()
    assert {layouts[f"layers.{i}.up.weight"] for i in range(5)} == {(S1,)}
    assert layouts["head.weight"] == (R,)
    by_name = {node.name: plan.options[node.index] for node in plan.graph.nodes}
    assert by_name["tokens"].outputs == ((S0,),)
    assert by_name["output"].operands == ((Shard(2),),)
    assert by_name["output/tangent"].outputs == ((Shard(2),),)


def test_a_module_constraint_holds_only_the_phase_asked_for(planner: Planner) -> None:
    nodes = {node.name: node for node in planner.graph.nodes}
    for phase in ("forward", "backward"):
        resolved = resolve_constraints(
            Constraints(nodes={"layers.2.up": ModuleOutput(layout=(S0,), phase=phase)}),
            planner.graph,
            MESH,
        )
        assert resolved
        assert {nodes[each.node].phase for each in resolved} == {phase}
        assert {nodes[each.node].module for each in resolved} == {"layers.2.up"}


def test_every_wrong_constraint_is_named(planner: Planner) -> None:
    with pytest.raises(ConstraintError) as error:
        resolve_constraints(
            Constraints(
                inputs={"token": (S0,)},
                outputs={"output": (S0, R)},
                parameters={"head.weight": {"model": S0}, "embedding.weight": (Shard(3),)},
                nodes={"layers.9.up": (R,)},
            ),
            planner.graph,
            MESH,
        )
    assert str(error.value) == (
        "constraints:\n"
        "  inputs['token']: there is none; there are ['tokens']\n"
        "  outputs['output']: 2 placements for 1 mesh axes ['data']\n"
        "  parameters['head.weight']: axes ['model'] do not exist; ['data'] do\n"
        "  parameters['embedding.weight']: (S(3)) does not cut shape (64, 32) evenly on mesh "
        "{'data': 4}, the shape of 'embedding.weight'\n"
        "  nodes['layers.9.up']: there is no such node or module; there are "
        "['layers.4.up', 'layers.3.up', 'layers.2.up']"
    )


def test_a_layout_that_no_option_offers_is_refused(planner: Planner) -> None:
    with pytest.raises(ConstraintError) as error:
        planner.find(constraints=Constraints(parameters={"head.weight": (Partial(),)}))
    assert str(error.value) == (
        "constraints:\n  node 'head.weight' has no option with output 0 in (P(sum))"
    )


def test_constraints_that_contradict_each_other_are_named(planner: Planner) -> None:
    gradient = resolve_constraints(
        Constraints(parameters={"head.weight": (S0,)}), planner.graph, MESH
    )
    other = [
        type(each)(node="head.weight/gradient", side="operand", position=0, placements=(S1,))
        for each in gradient
    ]
    with pytest.raises(InfeasiblePlacementError) as error:
        planner.find(constraints=[*gradient, *other])
    assert str(error.value).startswith(
        "constraints contradict each other; no placement has all of\n"
        "  output 0 of 'head.weight' in (S(0))\n"
        "  operand 0 of 'head.weight/gradient' in (S(1))\n"
    )


def test_a_budget_too_small_says_by_how_much_and_what_dominates(planner: Planner) -> None:
    with pytest.raises(InfeasiblePlacementError) as error:
        planner.find(memory_budget_bytes=1000)
    first, *table, advice = str(error.value).splitlines()
    smallest = first.split("no placement takes less than ")[1].removesuffix(" bytes, of which")
    short = int(smallest.replace(",", "")) - 1000
    assert first == (
        f"the memory budget of 1,000 bytes a rank is too small by {short:,} bytes: no placement "
        f"takes less than {smallest} bytes, of which"
    )
    assert {line.split("  ")[1] for line in table} - {"recomputed"} == {
        "parameters",
        "gradients",
        "optimizer state",
        "saved activations",
    }
    assert advice.startswith("parameters, gradients and optimizer state alone take ")
    shares = [float(line.split()[-1].rstrip("%")) for line in table]
    assert shares == sorted(shares, reverse=True)
    assert math.isclose(sum(shares), 100.0, abs_tol=0.3)


def test_a_budget_that_each_moment_alone_could_keep_is_not_called_less_than_any_takes() -> None:
    with torch.device("meta"):
        stack = planner_of_model(Stack(2, 256), MESH, (torch.empty(4096, 256),))
    wanted = Constraints(inputs={"x": [Shard(0)]}, outputs={"output": [Shard(0)]})

    def first_line(budget: int) -> str:
        with pytest.raises(InfeasiblePlacementError) as error:
            stack.find(constraints=wanted, memory_budget_bytes=budget)
        return str(error.value).splitlines()[0]

    told = re.findall(r"(?:less than|one takes) ([\d,]+) bytes", first_line(1000))
    of_one_moment, of_one_placement = (int(each.replace(",", "")) for each in told)
    assert first_line(of_one_moment) == (
        f"the memory budget of {of_one_moment:,} bytes a rank is too small: placements keep it at "
        "each moment of a step, and none was found that keeps it at all of them; one takes "
        f"{of_one_placement:,} bytes, of which"
    )
    found = stack.find(constraints=wanted, memory_budget_bytes=of_one_placement)
    assert found.memory.total == of_one_placement


def test_an_error_beside_a_plan_that_keeps_the_budget_says_what_the_search_counts(
    planner: Planner,
) -> None:
    request = ResolvedRequest(memory_budget_bytes=2**30)
    placement = planner.problem(request)
    choices = placement.solution_of(planner.find().options)
    shortage = MemoryShortage(
        row="a row", budget_bytes=2**30, minimum_bytes=2**30 + 1, choices=choices
    )
    error = MemoryBudgetError("", shortages=(shortage,), jointly=True, frugal=choices)
    said = str(explained(error, placement, request, MESH)).splitlines()[0]
    assert said.startswith(
        "no placement was found that keeps the memory budget of 1.000 GiB a rank, as the search "
        "counts a little more than plans take where kinds of layers alternate; one takes "
    )


def test_half_of_the_time_is_kept_for_all_rows_and_an_error_names_the_limit_asked_for(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = planner.find(relative_gap=0.01).memory
    assert sum(memory.at_reduction.values()) < memory.total
    limits: list[float] = []
    num_late = 1

    def late(*args: Any, time_limit_seconds: float, **kwargs: Any) -> Solution:
        limits.append(time_limit_seconds)
        if len(limits) <= num_late:
            raise OutOfTimeError(time_limit_seconds)
        return solve(*args, time_limit_seconds=time_limit_seconds, **kwargs)

    monkeypatch.setattr("gt_autoparallel.planner.solve", late)

    def find() -> int:
        return planner.find(
            memory_budget_bytes=memory.total - 1,
            recomputes=False,
            relative_gap=0.01,
            time_limit_seconds=60.0,
        ).memory.total

    assert find() < memory.total
    assert limits[0] <= 30.0 < limits[1] <= 60.0
    limits.clear()
    num_late = 2
    with pytest.raises(OutOfTimeError, match=r"within 60\.0 seconds; allow more time"):
        find()


def test_a_budget_is_not_searched_for_if_every_plan_is_too_dear(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = planner.find(relative_gap=0.01)
    budget = free.memory.total - 1
    monkeypatch.setattr(planner, "_mixed", None)
    with pytest.raises(DearPlacementError) as error:
        planner.find(
            memory_budget_bytes=budget,
            relative_gap=0.01,
            below_us=free.solver.lower_bound_us,
        )
    assert str(error.value) == (
        f"every plan costs {free.solver.lower_bound_us:.0f} us or more; "
        f"one that costs less than {free.solver.lower_bound_us:.0f} us was asked for"
    )


def test_nothing_is_branched_for_plans_that_are_too_dear_within_a_budget(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = planner.find(relative_gap=0.01)
    below_us = 2 * free.objective_us

    def nothing(*args: object, **further: object) -> MixedSolution:
        return MixedSolution(
            mixture=None,
            lower_bound_us=3 * free.objective_us,
            gap=math.inf,
            seconds=0.0,
            memory_prices=(),
            warm_start=WarmStart(choices=()),
        )

    monkeypatch.setattr("gt_autoparallel.planner.solve_mixed", nothing)
    asked = {"memory_budget_bytes": free.memory.total - 1, "relative_gap": 0.01}
    with pytest.raises(DearPlacementError) as error:
        planner.find(**asked, below_us=below_us)
    assert error.value.least_us == 3 * free.objective_us
    assert planner.find(**asked).memory.total < free.memory.total


def test_asking_again_makes_no_table_again(planner: Planner, lines: list[str]) -> None:
    planner.find(constraints=Constraints(inputs={"tokens": (S0,)}))
    first, again = (
        planner.problem(ResolvedRequest(memory_budget_bytes=budget, recomputes=False)).problem
        for budget in (2**40, 2**41)
    )
    assert first.edges is again.edges
    assert any(line.startswith("captured ") for line in lines)
    assert any(line.startswith("audited ") for line in lines)


def test_saved_are_values_that_the_backward_reads(planner: Planner) -> None:
    saved = saved_storages(planner.graph, recomputes=False)
    nodes = planner.graph.nodes
    for value in saved.values:
        assert nodes[value.node].phase == "forward"
        assert nodes[value.node].kind not in ("parameter", "buffer", "input", "share")
    statuses = {nodes[index].name: status for index, status in saved.statuses.items()}
    # The weight is gathered by its share node, transposed, and read by the backward's product.
    assert statuses["layers.0.up/t/share"] == ("moved", "aliased")
    assert statuses["layers.0.up.weight/share"] == ("idle", "moved", "aliased")


class Halves(nn.Module):
    """The backward reads a half of what the product made, and the half keeps all of it alive."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, _ = self.up(x).split(32, dim=-1)
        return first.sin()


def test_a_saved_part_of_a_value_keeps_all_of_it() -> None:
    planner = planner_of_model(Halves().to("meta"), MESH, (torch.empty(8, 32, device="meta"),))
    plan = planner.find(constraints=Constraints(inputs={"x": (S0,)}, outputs={"output": (S0,)}))
    # By itself the half would be 2 * 32 floats on each of 4 ranks.
    assert plan.memory.saved_activations == 2 * 64 * 4


class SharedHalf(Halves):
    """The half is read twice, so that its share node could pass for a storage of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, _ = self.up(x).split(32, dim=-1)
        return first.sin() * first.cos()


def test_a_saved_part_that_stays_where_it_is_counts_as_the_whole() -> None:
    x = torch.empty(8, 32, device="meta")
    planner = planner_of_model(SharedHalf().to("meta"), MESH, (x,))
    from_loader = Constraints(inputs={"x": (S0,)}, outputs={"output": (S0,)})
    # A weight's shard with gradient and optimizer state; the product, the sine and the cosine.
    needed = 4 * 64 * 32 * 4 // 4 + 2 * (64 + 32 + 32) * 4
    plan = planner.find(constraints=from_loader, memory_budget_bytes=needed)
    assert plan.memory.total == needed
    # With less, the half must really move, which takes time; what is found was audited.
    moved = planner.find(constraints=from_loader, memory_budget_bytes=needed - 1)
    assert moved.memory.total < needed
    assert moved.objective_us > plan.objective_us


class InARow(nn.Module):
    """Each layer's backward reads what the layer before made, by a view of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(128, 128, bias=False) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_budget_between_two_moments_is_kept() -> None:
    whole = Constraints(
        inputs={"x": (S0,)}, outputs={"output": (S0,)}, parameters={"*": (Replicate(),)}
    )
    x = torch.empty(4, 16, 128, device="meta")
    planner = planner_of_model(InARow().to("meta"), MESH, (x,))
    memory = planner.find(constraints=whole).memory
    between = (memory.total + sum(memory.in_backward.values())) // 2
    assert memory.total == sum(memory.at_reduction.values()) > between
    for budget, recomputes in ((between, True), (between, False)):
        plan = planner.find(constraints=whole, memory_budget_bytes=budget, recomputes=recomputes)
        assert plan.memory.total <= budget


def test_a_plan_whose_search_ended_before_any_bound_is_known_to_cost_something(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def hurried(*args: Any, **kwargs: Any) -> Solution:
        return replace(solve(*args, **kwargs), lower_bound_us=-math.inf, proven=False)

    monkeypatch.setattr("gt_autoparallel.planner.solve", hurried)
    planner = planner_of_model(Block().to("meta"), MESH, (torch.empty(8, 32, device="meta"),))
    plan = find_with(planner, PlacementRequest(memory_budget_bytes=None))
    assert plan.solver.lower_bound_us == 0.0
    with pytest.warns(OpenSearchWarning) as warned:
        warn_if_open(plan, 1e-3)
    assert str(warned[0].message) == (
        "the search for a placement ended with a gap of 100.00%, 0.10% was asked for: the plan "
        f"costs {plan.objective_us:.0f} us, and it is only proven that none costs less than 0 us; "
        "a larger memory budget or more time (time_limit_seconds) may help"
    )
    path = write_plan(plan, tmp_path / "plan.json")  # JSON has no infinities
    assert read_plan(path, prices=plan.prices) == plan


def test_refuses_a_mesh_axis_larger_than_every_dim() -> None:
    with pytest.raises(PlacementInputError) as error:
        find_placement(Model().to("meta"), MeshShape(names=("data",), sizes=(4096,)), (TOKENS,))
    assert str(error.value) == (
        "mesh: axis 'data' has 4096 ranks, and no dim of any parameter or input is a multiple of "
        "4096: nothing could be sharded along it"
    )


def test_refuses_inputs_that_are_no_tensors() -> None:
    with pytest.raises(UnsupportedModelError, match=r"args\[0\] is a object; allowed: tensors"):
        find_placement(Model().to("meta"), MESH, (object(),))
