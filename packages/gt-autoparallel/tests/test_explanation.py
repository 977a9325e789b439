"""An explanation's differences are those of plans in which the other layout was asked for."""

from __future__ import annotations

import pytest
from plan_doubles import S0, S1, R
from planned_models import plan, planner

from gt_autoparallel.errors import ConstraintError
from gt_autoparallel.explanation import (
    Alternative,
    Explanation,
    explain,
    explain_parameters,
)
from gt_autoparallel.graph.layouts import Layout, short_text
from gt_autoparallel.problem.constraints import Constraints

UP = "layers.1.up.weight"


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    return explain(plan(), UP, planner=planner())


def test_every_other_layout_is_priced_by_planning_again_with_it(explanation):
    layouts = {explanation.layout, *(each.layout for each in explanation.alternatives)}
    assert layouts == {(R,), (S0,), (S1,)}
    for each in explanation.alternatives:
        assert each.is_exact
        assert each.at_least_us >= -1e-6, "the plan was not the best one"
        demands = Constraints(inputs={"x": [S0]}, parameters={"layers.[12].up.weight": each.layout})
        other = planner().find(constraints=demands)
        difference = other.objective_us - plan().objective_us
        assert each.at_most_us == pytest.approx(difference, abs=1e-6)
    costs = [each.at_most_us for each in explanation.alternatives]
    assert costs == sorted(costs)


def test_alike_layers_are_explained_together(explanation):
    assert explanation.name == "layers.1-2.up.weight"


def test_parameters_of_alike_layers_are_asked_about_once(monkeypatch):
    asked = []

    def noted(asked_plan, name, **_):
        asked.append(name)
        return f"why {name}"

    monkeypatch.setattr("gt_autoparallel.explanation.explain", noted)
    reasons = explain_parameters(plan(), planner=planner())
    assert list(reasons) == list(plan().parameter_layouts())
    assert len(asked) == len(set(asked)) < len(reasons)
    assert reasons[UP] == reasons["layers.2.up.weight"] == f"why {UP}"


def test_a_node_may_be_asked_about_and_one_layout_alone():
    node = next(node for node in plan().graph.nodes if node.name == "layers.1.up/mm")
    chosen = plan().options[node.index].outputs[0]
    layout: Layout = (S0,) if chosen != (S0,) else (R,)
    (alternative,) = explain(plan(), node.name, layouts=[layout], planner=planner()).alternatives
    assert alternative.layout == layout
    assert alternative.at_most_us >= 0
    assert alternative.is_exact


def test_what_contradicts_the_request_is_impossible_and_comes_last():
    found = explain(plan(), "x", planner=planner())
    assert found.layout == (S0,)
    assert {short_text(each.layout) for each in found.alternatives} == {"R", "S(1)"}
    assert all(each.impossible for each in found.alternatives)
    assert "  R is impossible: " in str(found)


def test_unknown_names_and_layouts_are_refused():
    with pytest.raises(ConstraintError, match=r"there is no node or parameter 'layers\.7'"):
        explain(plan(), "layers.7", planner=planner())
    with pytest.raises(ConstraintError) as error:
        explain(plan(), UP, layouts=[(S0, S0)], planner=planner())
    assert str(error.value) == (
        "node 'layers.1.up.weight' cannot lie in ['S(0) S(0)']; it can in ['R', 'S(0)', 'S(1)']"
    )


def test_the_text_tells_exact_costs_from_bounds():
    def alternative(layout: Layout, low: float, high: float, **rest: object) -> Alternative:
        return Alternative(
            layout=layout,
            at_least_us=low,
            at_most_us=high,
            memory_bytes=-1024,
            num_moved_nodes=3,
            **rest,
        )

    explanation = Explanation(
        name="layers.0-1.w",
        layout=(S0,),
        alternatives=(
            alternative((R,), 12.25, 12.25),
            alternative((S1,), -1.0, 20.0),
        ),
        costs_here=(("to layers.0.w/share: all_gather along dp", 4.5),),
        memory_price_us_per_gib=30.0,
    )
    assert str(explanation) == (
        "layers.0-1.w is S(0)\n"
        "  pays 4.5 us: to layers.0.w/share: all_gather along dp\n"
        "  R costs +12.2 us, -1,024 bytes, moves 3 other nodes\n"
        "  S(1) costs between -1.0 and +20.0 us (bounds), -1,024 bytes, moves 3 other nodes\n"
        "  one GiB more of memory would save 30.0 us at the margin\n"
    )
