"""What experts do is a part of the planner's problem, and the planner never loses to it."""

from __future__ import annotations

import importlib

import pytest
from planned_models import planner

from gt_autoparallel.errors import SolverError
from gt_autoparallel.expert_table import ExpertPlan, expert_plans
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.planner import Planner
from gt_autoparallel.problem.axis_styles import expert_styles
from gt_autoparallel.problem.constraints import ResolvedRequest
from gt_autoparallel.problem.expert_rivals import expert_pins, expert_rivals
from gt_autoparallel.solver.search import Search


@pytest.fixture(scope="module")
def experts() -> list[ExpertPlan]:
    return list(expert_plans(planner(), relative_gap=0.0))


def test_an_experts_plan_is_in_its_rival_and_in_no_other(experts: list[ExpertPlan]) -> None:
    placement = planner().problem(ResolvedRequest())
    rivals = expert_rivals(placement, expert_pins(planner().graph, planner().mesh))
    plans = [each.plan for each in experts]
    assert all(plans)
    for number, plan in enumerate(plans):
        assert plan is not None
        choices = placement.solution_of(plan.options)
        within = [
            all(mask[choice] for mask, choice in zip(rival, choices, strict=True))
            for rival in rivals
        ]
        assert within[number], experts[number].name
        others = [name for other, name in enumerate(within) if other != number]
        assert not all(others), experts[number].name


def test_an_expert_whose_pins_a_request_has_is_no_rival_of_its_own(
    experts: list[ExpertPlan],
) -> None:
    """It would be the whole problem once more, and to the optimum."""
    all_pins = expert_pins(planner().graph, planner().mesh)
    for each, pins in zip(experts, all_pins, strict=True):
        pinned = planner().problem(ResolvedRequest(constraints=pins))
        assert not expert_rivals(pinned, [pins]), each.name
        assert expert_rivals(pinned, all_pins), each.name
        assert len(expert_rivals(planner().problem(ResolvedRequest()), [pins])) == 1, each.name


def test_a_planner_whose_search_finds_nothing_still_does_what_the_best_expert_does(
    experts: list[ExpertPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Idle(Search):
        """Ends before it begins, as a time limit may end it."""

        def run(self) -> None:
            pass

    monkeypatch.setattr(importlib.import_module("gt_autoparallel.solver.solve"), "Search", Idle)
    known = planner()
    plan = Planner(known.graph, known.mesh, signature=known.signature).find()
    cheapest = min(each.plan.objective_us for each in experts if each.plan is not None)
    assert plan.objective_us <= cheapest * (1 + 1e-9)
    assert not plan.solver.proven

    monkeypatch.setattr("gt_autoparallel.planner.expert_rivals", lambda *_: [])
    with pytest.raises(SolverError, match="no choice that keeps all budgets was found"):
        Planner(known.graph, known.mesh, signature=known.signature).find()


def test_on_deep_meshes_all_axes_but_the_innermost_do_the_same() -> None:
    mesh = MeshShape(names=("pod", "node", "chip"), sizes=(2, 2, 2))
    styles = expert_styles(mesh)
    assert styles["FSDP + TP"] == {"pod": "fsdp", "node": "fsdp", "chip": "tp"}
    assert list(styles) == list(expert_styles(MeshShape(names=("a", "b"), sizes=(2, 2))))
