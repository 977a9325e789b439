"""Plans under budgets run parts of the forward again, only as much as needed, and say so."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from plan_doubles import S0
from planned_models import MESH, Stack
from torch import nn
from torch.distributed.tensor import Replicate

from gt_autoparallel.errors import InfeasiblePlacementError
from gt_autoparallel.explanation import explain
from gt_autoparallel.find import PlacementRequest, find_placement, planner_of_model
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.plan.plan_encoding import decode_plan, encode_plan
from gt_autoparallel.plan.plan_picture import drawn_layers
from gt_autoparallel.plan.prediction import predicted_collectives
from gt_autoparallel.plan.report_page import report_page
from gt_autoparallel.planner import Planner
from gt_autoparallel.prices.memory import device_budget_bytes
from gt_autoparallel.problem.constraints import Constraints

TOKENS, WIDTH = 8192, 512
FROM_LOADER = Constraints(inputs={"x": [S0]})


@cache
def planner() -> Planner:
    with torch.device("meta"):
        return planner_of_model(Stack(4, WIDTH), MESH, (torch.empty(TOKENS, WIDTH),))


@cache
def plan(share: float | None = None) -> PlacementPlan:
    """Under a budget of a share of what the plan without one takes."""
    budget = None if share is None else round(share * plan().memory.total)
    return planner().find(constraints=FROM_LOADER, memory_budget_bytes=budget)


def recomputed(found: PlacementPlan, layer: str) -> list[str]:
    names = [found.graph.nodes[index].name for index in found.recomputed]
    return [name for name in names if name.startswith(layer)]


def test_nothing_runs_again_without_need() -> None:
    assert plan().recomputed == ()
    assert plan(1.0).recomputed == ()
    assert plan(1.0).objective_us == plan().objective_us


def test_parameters_are_gathered_again_before_anything_is_computed_and_their_copies_cost() -> None:
    found = plan(0.97)
    copies_us = sum(each.in_full_us for each in found.redistributions if each.again)
    assert copies_us > 0
    assert found.objective_us == pytest.approx(plan().objective_us + copies_us, rel=1e-9)
    assert {name.rpartition(".")[2] for name in recomputed(found, "")} == {"weight/share"}
    assert all(plan().compute_us[index] == 0 for index in found.recomputed)
    again = [c for c in predicted_collectives(found) if c.purpose == "unshard"]
    assert {c.phase for c in again} == {"forward", "backward"}


def test_tighter_budgets_cost_more_and_recompute_more() -> None:
    plans = [plan(share) for share in (0.95, 0.8, 0.6, 0.4)]
    costs = [each.objective_us for each in plans]
    assert costs == sorted(costs)
    assert costs[-1] > 1.05 * costs[0]
    for share, each in zip((0.95, 0.8, 0.6, 0.4), plans, strict=True):
        assert each.memory.total <= share * plan().memory.total
        assert each.solver.proven
    # What memory bounds goes first, and matrix products only if that is not enough.
    products = [[n for n in recomputed(each, "layers.1") if n.endswith("/mm")] for each in plans]
    assert products[:3] == [[], [], []]
    assert products[3] == ["layers.1.up/mm"]


@pytest.mark.parametrize("share", [0.9, 0.75])
def test_a_result_of_a_norm_that_only_a_view_keeps_alive_counts_in_the_budget(share: float) -> None:
    # LayerNorm returns what it normed and two statistics, and the backward reads a view of the first.
    with torch.device("meta"):
        of_layer_norms = planner_of_model(Stack(2, 16, nn.LayerNorm), MESH, (torch.empty(64, 16),))
    budget = round(share * of_layer_norms.find().memory.total)
    # Audited: the problem and the audit count bytes each in a way of its own.
    found = of_layer_norms.find(memory_budget_bytes=budget)
    assert 0.8 * budget < found.memory.total <= budget


def test_reductions_count_for_a_plan_that_would_exceed_the_budget_there() -> None:
    with torch.device("meta"):
        captured = planner_of_model(Stack(2, 64), MESH, (torch.empty(320, 64),))
    whole = Constraints(inputs={"x": [S0]}, parameters={"*": [Replicate()]})
    memory = captured.find(constraints=whole).memory
    at_reduction, at_loss = (sum(e.values()) for e in (memory.at_reduction, memory.at_loss))
    lines: list[str] = []
    of_loss = Planner(
        captured.graph,
        MESH,
        signature=captured.signature,
        loss_bytes=at_reduction - at_loss + 1,  # without a budget the loss is the fullest moment
        progress=lines.append,
    )
    of_loss.find(constraints=whole, relative_gap=1e-3)
    searched = []
    for less in (20_000, 60_000):
        lines.clear()
        budget = at_reduction - less
        found = of_loss.find(constraints=whole, memory_budget_bytes=budget, relative_gap=1e-3)
        searched.append(sum("choices" in line for line in lines))
        assert sum(found.memory.at_reduction.values()) <= budget
    # Each once more for layers that do the same, since no mixture is proven.
    assert searched == [1 + 1, 2 + 1]


def test_without_recomputation_the_same_budget_is_out_of_reach() -> None:
    budget = round(0.4 * plan().memory.total)
    with pytest.raises(InfeasiblePlacementError) as error:
        planner().find(constraints=FROM_LOADER, memory_budget_bytes=budget, recomputes=False)
    assert str(error.value).endswith(
        "recomputes=True would let the backward compute again what it does not keep"
    )


def test_a_budget_below_the_state_of_parameters_says_what_would_help() -> None:
    with pytest.raises(InfeasiblePlacementError) as error:
        planner().find(constraints=FROM_LOADER, memory_budget_bytes=2**20)
    assert "parameters, gradients and optimizer state alone take" in str(error.value)
    assert "more ranks, parameters of fewer bytes" in str(error.value)


def test_a_plan_file_keeps_what_runs_again() -> None:
    found = plan(0.6)
    assert decode_plan(encode_plan(found), found.prices) == found


def test_drawings_and_reasons_have_what_runs_again_in_the_backward() -> None:
    found = plan(0.65)
    (drawn,) = drawn_layers(found)
    up = next(each for each in drawn.parameters if each.name == "up.weight")
    assert [(move.purpose, move.phase) for move in up.moves] == [
        ("unshard", "forward"),
        ("unshard", "backward"),
        ("reduce gradient", "backward"),
    ]
    page = report_page(found)
    assert f"recomputed {found.memory.recomputed // 2**20}.00 MiB" in page
    assert 'class="recomputed"' not in report_page(plan())
    layout = found.parameter_layouts()["layers.1.up.weight"]
    why = explain(found, "layers.1.up.weight", layouts=[layout], planner=planner())
    (again,) = [what for what, _ in why.costs_here if "again in the backward" in what]
    assert again.startswith("to layers.1.up.weight/share: all_gather along dp, again")
    why = explain(found, "layers.1/silu", layouts=[], planner=planner())
    assert [what for what, _ in why.costs_here] == ["compute", "compute again in the backward"]


def test_the_default_budget_is_nine_tenths_of_the_device() -> None:
    assert device_budget_bytes(80_000_000_000) == 72_000_000_000
    with torch.device("meta"):
        model, x = Stack(4, WIDTH), torch.empty(TOKENS, WIDTH)
    found = find_placement(model, MESH, (x,), PlacementRequest(constraints=FROM_LOADER))
    assert found.request.memory_budget_bytes == 72_000_000_000
    unlimited = PlacementRequest(constraints=FROM_LOADER, memory_budget_bytes=None)
    assert find_placement(model, MESH, (x,), unlimited).request.memory_budget_bytes is None
