"""The audit passes plans that are right, and notices whatever is changed in one."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import pytest
from plan_doubles import (
    DDP,
    FSDP,
    S0,
    S1,
    TENSOR_PARALLEL,
    P,
    Prices,
    R,
    node_options,
    plan_by_hand,
)

from gt_autoparallel.audit.plan_audit import audit_plan, examined
from gt_autoparallel.errors import AuditError
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.problem.constraints import LayoutConstraint, ResolvedRequest

CASES = {
    "ddp": (("dp", 4, DDP),),
    "fsdp": (("dp", 4, FSDP),),
    "tp": (("tp", 2, TENSOR_PARALLEL),),
    "fsdp x tp": (("dp", 2, FSDP), ("tp", 2, TENSOR_PARALLEL)),
    "ddp x fsdp x tp": (("a", 2, DDP), ("b", 2, FSDP), ("c", 2, TENSOR_PARALLEL)),
    "an axis of one rank": (("one", 1, FSDP), ("dp", 2, FSDP)),
}


def offered(node, operands, mesh, *, replicate_unknown=()):
    return node_options(node, operands, mesh)


def problems(plan: PlacementPlan) -> list[str]:
    return examined(plan, offered)[0]


@pytest.fixture(scope="module")
def plan() -> PlacementPlan:
    return plan_by_hand(("dp", 2, FSDP), ("tp", 2, TENSOR_PARALLEL))


@pytest.mark.parametrize("case", CASES)
def test_plans_that_are_right_pass(case: str):
    plan = plan_by_hand(*CASES[case])
    report = audit_plan(plan, offered=offered)
    assert report.relative_error < 1e-12
    assert report.memory == plan.memory
    assert report.num_nodes == 19
    assert report.num_redistributions == len(plan.redistributions)


def test_says_what_it_has_seen(plan):
    assert str(audit_plan(plan, offered=offered)) == (
        "audited 19 nodes, 5 redistributions, 5 steps: 11.760 us, off by 0.0e+00"
    )


def test_every_other_layout_of_every_node_is_noticed(plan):
    """Each operand and output in turn gets each other placement on each axis."""
    num_changes = 0
    for index, option in enumerate(plan.options):
        for side in ("operands", "outputs"):
            for position, layout in enumerate(getattr(option, side)):
                for axis in range(2):
                    for placement in {R, S0, S1, P} - {layout[axis]}:
                        changed = list(layout)
                        changed[axis] = placement
                        layouts = list(getattr(option, side))
                        layouts[position] = tuple(changed)
                        options = list(plan.options)
                        options[index] = replace(option, **{side: tuple(layouts)})
                        num_changes += 1
                        assert problems(replace(plan, options=tuple(options))), (index, changed)
    assert num_changes > 200


def test_every_other_option_of_every_operator_is_noticed(plan):
    for node in plan.graph.of_kind("operator"):
        operands = tuple(plan.graph.spec(value) for value in node.operands)
        for option in node_options(node, operands, plan.mesh):
            if option == plan.options[node.index]:
                continue
            options = list(plan.options)
            options[node.index] = option
            assert problems(replace(plan, options=tuple(options))), (node.name, option)


def test_a_dropped_doubled_or_reordered_redistribution_is_noticed(plan):
    all_of_them = plan.redistributions
    for number, each in enumerate(all_of_them):
        without = all_of_them[:number] + all_of_them[number + 1 :]
        for wrong in (
            without,
            (*all_of_them, each),
            (*without, replace(each, steps=())),
            (*without, replace(each, steps=(*each.steps, each.steps[-1]))),
        ):
            assert problems(replace(plan, redistributions=wrong))


def test_every_changed_step_is_noticed(plan):
    changes = (
        {"kind": "broadcast"},
        {"axis": 0},
        {"axis": 1},
        {"axis": 2},
        {"source_dim": 1},
        {"source_dim": None},
        {"target_dim": 0},
        {"target_dim": None},
        {"input_shape": (1, 1)},
        {"output_shape": (1, 1)},
    )
    for number, each in enumerate(plan.redistributions):
        for place, change in itertools.product(range(len(each.steps)), changes):
            steps = list(each.steps)
            steps[place] = replace(steps[place], **change)
            if steps[place] == each.steps[place]:
                continue
            redistributions = list(plan.redistributions)
            redistributions[number] = replace(each, steps=tuple(steps))
            assert problems(replace(plan, redistributions=tuple(redistributions))), change


def test_every_changed_time_is_noticed(plan):
    for index, time_us in enumerate(plan.compute_us):
        wrong = list(plan.compute_us)
        wrong[index] = time_us * 1.00001 + 1e-6
        assert problems(replace(plan, compute_us=tuple(wrong)))
    for number, each in enumerate(plan.redistributions):
        redistributions = list(plan.redistributions)
        redistributions[number] = replace(each, in_full_us=each.in_full_us * 1.00001)
        assert problems(replace(plan, redistributions=tuple(redistributions)))
        redistributions[number] = replace(each, hidden_us=each.hidden_us + 1e-3)
        assert problems(replace(plan, redistributions=tuple(redistributions)))
        other = None if each.window is not None else "layers.0 forward"
        redistributions[number] = replace(each, window=other)
        assert problems(replace(plan, redistributions=tuple(redistributions)))
    for number, window in enumerate(plan.windows):
        for change in (
            {"name": "elsewhere"},
            {"compute_us": window.compute_us + 1e-3},
            {"communication_us": window.communication_us + 1e-3},
        ):
            windows = list(plan.windows)
            windows[number] = replace(window, **change)
            assert problems(replace(plan, windows=tuple(windows))), change
        assert problems(replace(plan, windows=(*plan.windows, window)))


def test_an_objective_off_by_more_than_a_millionth_is_noticed(plan):
    right = plan.solver.objective_us
    for factor, is_noticed in ((1 + 5e-7, False), (1 + 2e-6, True), (1 - 2e-6, True)):
        solver = replace(plan.solver, objective_us=right * factor)
        assert bool(problems(replace(plan, solver=solver))) == is_noticed
    # What today's best-known planner is off by on an 8B model.
    solver = replace(plan.solver, objective_us=right * 1.0167)
    assert problems(replace(plan, solver=solver)) == [
        f"the plan costs {right} us; the solver's objective is {right * 1.0167} us, off by +1.670%"
    ]


def test_a_lower_bound_above_the_plan_is_noticed(plan):
    solver = replace(plan.solver, lower_bound_us=plan.solver.objective_us * 1.01)
    assert any(
        "less than the lower bound" in each for each in problems(replace(plan, solver=solver))
    )


def test_every_changed_byte_and_a_broken_budget_are_noticed(plan):
    for part in fields(plan.memory):
        memory = replace(plan.memory, **{part.name: getattr(plan.memory, part.name) + 1})
        (problem,) = problems(replace(plan, memory=memory))
        assert problem.startswith(f"{part.name.replace('_', ' ')} ")
    budget = plan.memory.total
    assert problems(replace(plan, request=ResolvedRequest(memory_budget_bytes=budget))) == []
    assert problems(replace(plan, request=ResolvedRequest(memory_budget_bytes=budget - 1))) == [
        f"{budget:,} bytes are 1 over the budget of {budget - 1:,}"
    ]


def test_layouts_that_are_linked_must_be_equal():
    """A gradient that arrives sharded for a replicated parameter, priced right in all else."""
    plan = plan_by_hand(("dp", 4, {**FSDP, "p0": R}))
    gradient = plan.graph.of_kind("gradient")[0].index
    options = list(plan.options)
    options[gradient] = replace(options[gradient], operands=((S0,),))
    assert "node 'g0': S(0), but its parameter has R" in problems(
        replace(plan, options=tuple(options))
    )


def test_a_constraint_that_is_not_kept_is_noticed(plan):
    def constrained(*constraints: LayoutConstraint) -> list[str]:
        return problems(replace(plan, request=ResolvedRequest(constraints=constraints)))

    kept = LayoutConstraint(node="x", side="output", position=0, placements=(S0, None))
    assert constrained(kept) == []
    broken = LayoutConstraint(node="mm1", side="operand", position=1, placements=(R, S1))
    unknown = replace(kept, node="nowhere")
    assert constrained(broken, kept, unknown) == [
        "constraint on node 'mm1', operand 1: planned as R S(0)",
        "constraint on node 'nowhere': there is no such node",
    ]


def test_what_is_replicated_without_a_rule_must_be_listed(plan):
    assert problems(replace(plan, replicated_nodes=("mm0",))) == [
        "node 'mm0' is listed as replicated without a rule, which it is not"
    ]


def test_another_graph_is_noticed(plan):
    nodes = tuple(
        replace(node, module="layers.0") if node.module else node for node in plan.graph.nodes
    )
    assert problems(replace(plan, graph=replace(plan.graph, nodes=nodes)))


def test_other_prices_are_noticed(plan):
    assert problems(replace(plan, prices=Prices(us_per_node=1.5)))


def test_the_error_lists_what_is_wrong(plan):
    solver = replace(plan.solver, objective_us=1.0, lower_bound_us=0.0)
    with pytest.raises(AuditError) as error:
        audit_plan(replace(plan, solver=solver), offered=offered)
    total = plan.solver.objective_us
    assert str(error.value) == (
        "the plan is not what it says:\n"
        f"  - the plan costs {total} us; the solver's objective is 1.0 us, off by -91.497%"
    )
    with pytest.raises(AuditError, match=r"and \d+ more$"):
        audit_plan(
            replace(plan, compute_us=tuple(time + 1 for time in plan.compute_us)), offered=offered
        )
