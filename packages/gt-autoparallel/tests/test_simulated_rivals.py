"""The plan that is taken has the fastest simulated step of all candidates, each of which is asked."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from plan_doubles import S0, R
from planned_models import Stack

from gt_autoparallel import (
    Constraints,
    JudgedStep,
    MeshShape,
    PlacementPlan,
    PlacementRequest,
    find_placement,
    planner_of_model,
    read_plan,
    write_plan,
)
from gt_autoparallel.errors import SolverError, UnrunnablePlanError
from gt_autoparallel.expert_table import expert_plans
from gt_autoparallel.graph.redistribution import RedistributionStep
from gt_autoparallel.planner import Planner
from gt_autoparallel.simulated_rivals import (
    OWN,
    QUEUED,
    QueuedPrices,
    largest_layer_bytes,
    with_rivals,
)
from gt_passes.simulation import CostModel

MESH = MeshShape(names=("dp", "tp"), sizes=(2, 2))
BATCH, TOKENS, WIDTH = 8, 64, 256
GIVEN = Constraints(inputs={"*": [S0, R]})


def example() -> tuple[Stack, torch.Tensor]:
    with torch.device("meta"):
        return Stack(2, WIDTH), torch.empty(BATCH, TOKENS, WIDTH)


@cache
def planner() -> Planner:
    model, x = example()
    return planner_of_model(model, MESH, (x,))


@cache
def own() -> PlacementPlan:
    return planner().find(constraints=GIVEN)


def judged(
    time_of: Callable[[PlacementPlan], float], seen: list[PlacementPlan] | None = None
) -> PlacementPlan:
    def judge(plan: PlacementPlan) -> JudgedStep:
        if seen is not None:
            seen.append(plan)
        return JudgedStep(step_us=time_of(plan), peak_bytes=plan.memory.total, fits=True)

    return with_rivals(planner(), own(), judge, relative_gap=0.0, time_limit_seconds=60.0)


@pytest.fixture
def everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is too dear to be simulated."""
    monkeypatch.setattr("gt_autoparallel.simulated_rivals._WORTH_SIMULATING", float("inf"))


@pytest.mark.usefixtures("everybody")
@pytest.mark.parametrize("seed", range(6))
def test_the_plan_that_is_taken_has_the_least_time_of_all_candidates(seed: int) -> None:
    draw, times, seen = random.Random(seed), {}, []

    def time_of(plan: PlacementPlan) -> float:
        return times.setdefault((plan.options, plan.recomputed), draw.random())

    taken = judged(time_of, seen)
    assert len(seen) >= 3
    assert time_of(taken) == min(map(time_of, seen))
    judgement = taken.judgement
    assert judgement is not None
    simulated = {each.name: each.step for each in judgement.candidates if each.step is not None}
    assert len(simulated) == len(seen)
    assert simulated[judgement.chosen].step_us == time_of(taken)
    unchanged = replace(taken, judgement=None)
    assert unchanged == next(each for each in seen if each.options == taken.options)


@pytest.mark.usefixtures("everybody")
def test_rivals_do_what_experts_do_and_keep_what_was_asked_for() -> None:
    seen: list[PlacementPlan] = []
    judged(lambda plan: 1.0, seen)
    names = [each.name for each in _candidates(judged(lambda plan: 1.0))]
    assert names == [OWN, QUEUED, "FSDP", "FSDP + TP", "FSDP + TP + SP"]
    (x,) = planner().graph.of_kind("input")
    assert {plan.options[x.index].output() for plan in seen} == {(S0, R)}
    assert len({plan.options for plan in seen}) == len(seen)  # nothing is simulated twice


def test_of_equally_fast_steps_the_planners_own_is_taken() -> None:
    taken = judged(lambda plan: 1.0)
    assert taken == own()
    assert taken.judgement is not None
    assert taken.judgement.chosen == OWN


def test_a_plan_of_which_no_step_can_be_made_is_not_taken_and_nobody_is_too_dear_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The judgement says why."""
    monkeypatch.setattr("gt_autoparallel.simulated_rivals._WORTH_SIMULATING", 1.0)

    def judge(plan: PlacementPlan) -> JudgedStep:
        if plan == own():
            raise UnrunnablePlanError("its tokens come in no chunks")
        return JudgedStep(step_us=1.0, peak_bytes=plan.memory.total, fits=True)

    taken = with_rivals(planner(), own(), judge, relative_gap=0.0, time_limit_seconds=60.0)
    first, *others = _candidates(taken)
    assert str(first) == f"{OWN}: not simulated: its tokens come in no chunks"
    assert all(each.step is not None or "the same as" in each.reason for each in others)
    assert taken.judgement is not None
    assert taken.judgement.chosen == next(each.name for each in others if each.step is not None)


def test_where_no_step_can_be_made_of_any_plan_the_error_has_all_reasons() -> None:
    def judge(plan: PlacementPlan) -> JudgedStep:
        raise UnrunnablePlanError("its tokens come in no chunks")

    with pytest.raises(UnrunnablePlanError) as error:
        with_rivals(planner(), own(), judge, relative_gap=0.0, time_limit_seconds=60.0)
    of_each = [
        "planner: not simulated: its tokens come in no chunks",
        "planner, with queues: not simulated: the same as planner",
        *(
            f"{name}: not simulated: its tokens come in no chunks"
            for name in ("FSDP", "FSDP + TP", "FSDP + TP + SP")
        ),
    ]
    assert str(error.value) == f"no step can be made of any plan: {'; '.join(of_each)}"


@pytest.mark.parametrize("is_searched", [False, True])
def test_who_costs_much_more_is_not_simulated_and_the_judgement_says_so(
    is_searched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a budget already, so that nobody searches; or with the budget."""
    monkeypatch.setattr("gt_autoparallel.simulated_rivals._WORTH_SIMULATING", 1.0)
    if is_searched:
        monkeypatch.setattr(
            "gt_autoparallel.simulated_rivals.expert_plans",
            lambda *args, below_us, **further: expert_plans(*args, **further),
        )
    seen: list[PlacementPlan] = []
    candidates = _candidates(judged(lambda plan: 1.0, seen))
    assert [plan.objective_us for plan in seen] == [own().objective_us]
    dear = [each for each in candidates if each.reason.startswith("not simulated: ")]
    dear = [each for each in dear if "the same" not in each.reason]
    assert {each.objective_us is None for each in dear} == {not is_searched}
    for each in dear:
        told = re.fullmatch(
            rf"{re.escape(each.name)}: not simulated: (\d+\.\d\d) "
            r"times the cost by the planner's prices( or more)?",
            str(each),
        )
        assert told is not None, str(each)
        assert (told[2] is None) == is_searched
        if each.objective_us is not None:
            assert float(told[1]) == round(each.objective_us / own().objective_us, 2)
        else:  # by the bound that was known when the search was cut
            assert float(told[1]) >= 1.0


def test_who_costs_exactly_as_much_as_is_too_dear_is_not_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = {
        each.name: each.plan.objective_us
        for each in expert_plans(planner(), constraints=own().request.constraints, relative_gap=0.0)
        if each.plan is not None and not each.name.startswith("DDP")
    }
    (dearest,) = (name for name, cost in costs.items() if cost == max(costs.values()))
    for limit_us, is_simulated in ((costs[dearest], False), (costs[dearest] * (1 + 1e-8), True)):
        monkeypatch.setattr(
            "gt_autoparallel.simulated_rivals._worth_simulating_us", lambda own, us=limit_us: us
        )
        (found,) = (each for each in _candidates(judged(lambda plan: 1.0)) if each.name == dearest)
        assert (found.step is not None) == is_simulated, found


def test_whose_search_ends_without_a_plan_is_not_simulated_and_the_judgement_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own()

    def find(*_: object, **__: object) -> PlacementPlan:
        raise SolverError("no choice was found within 12.0 seconds; allow more time")

    monkeypatch.setattr(Planner, "find", find)
    judgement = judged(lambda _: 1.0).judgement
    assert judgement is not None
    reasons = {each.name: each.reason for each in judgement.candidates}
    assert reasons.pop(OWN) == ""
    assert reasons.keys() >= {QUEUED, "FSDP"}
    assert {*reasons.values()} == {"no plan: no choice was found within 12.0 seconds"}


def test_a_plan_file_says_who_was_taken_and_all_simulated_times(tmp_path: Path) -> None:
    taken = judged(lambda plan: plan.objective_us)
    path = write_plan(taken, tmp_path / "plan.json")
    assert read_plan(path, prices=planner().prices).judgement == taken.judgement


def test_find_placement_takes_what_its_judge_finds_fastest() -> None:
    model, x = example()

    def slowest_by_prices(plan: PlacementPlan) -> JudgedStep:
        return JudgedStep(step_us=-plan.objective_us, peak_bytes=0, fits=True)

    request = PlacementRequest(constraints=GIVEN, judge=slowest_by_prices)
    plan = find_placement(model, MESH, (x,), request)
    costs = [each.objective_us for each in _candidates(plan) if each.step is not None]
    assert plan.objective_us == max(costs)


def test_along_axes_with_queues_activations_wait_for_a_layer_and_parameters_do_not() -> None:
    cost_model = CostModel()
    layer_bytes = largest_layer_bytes(planner().graph)
    assert layer_bytes == (2 * 4 * WIDTH * WIDTH + WIDTH) * 4
    queued = QueuedPrices(cost_model, microbatches=None, layer_bytes=layer_bytes, axes=[0])
    plain = planner().prices
    wait_us = cost_model.collective_us("all_gather", layer_bytes // 2, MESH.ranks_of_axis(0))

    def waits(axis: int, move: str | None) -> float:
        step = RedistributionStep(
            kind="all_gather",
            axis=axis,
            source_dim=0,
            target_dim=None,
            input_shape=(512,),
            output_shape=(1024,),
        )
        times = [each.step_time(step, torch.float32, MESH, move) for each in (queued, plain)]
        assert times[0].hidden_us == times[1].hidden_us
        return times[0].in_full_us - times[1].in_full_us

    assert waits(0, None) == pytest.approx(wait_us)
    assert waits(1, None) == waits(0, "unshard") == waits(0, "reduce_grad") == 0.0


def _candidates(plan: PlacementPlan):
    assert plan.judgement is not None
    return plan.judgement.candidates
