"""What a step of several microbatches does once, and what is there for each live one."""

from __future__ import annotations

import dataclasses

import pytest
from planned_models import MESH, example, model, plan
from torch.distributed.tensor import Shard

from gt_autoparallel.audit import audit_plan
from gt_autoparallel.errors import AuditError, PlacementInputError
from gt_autoparallel.find import PlacementRequest, find_placement, planner_of_model
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.prices.costs import PlacementPrices
from gt_autoparallel.prices.memory import plan_memory
from gt_autoparallel.prices.microbatches import (
    Microbatches,
    accumulated_gradients,
    gathered_parameters,
)
from gt_autoparallel.prices.saved_storages import saved_storages
from gt_autoparallel.problem.constraints import Constraints

S0 = Shard(0)
NUM_PARAMETERS = 4 * 2 * 512 * 2048
"""Of the model."""


def sharded(microbatches: Microbatches | None) -> PlacementPlan:
    """FSDP of the model."""
    request = PlacementRequest(
        constraints=Constraints(inputs={"x": [S0]}, parameters={"*": [S0]}),
        microbatches=microbatches,
    )
    return find_placement(model(), MESH, example(), request)


def test_what_is_saved_is_there_for_each_live_microbatch_and_parameters_once() -> None:
    whole, one, three = (
        sharded(each)
        for each in (
            None,
            Microbatches(num_in_step=4, num_live=1),
            Microbatches(num_in_step=4, num_live=3),
        )
    )
    of_a_microbatch = (three.memory.saved_activations - one.memory.saved_activations) // 2
    # Nobody asks for the gradient of x, and so for the first of eight parameters.
    assert one.memory.saved_activations - of_a_microbatch == 4 * NUM_PARAMETERS * 7 // 8
    # Sums of gradients are whole until all are there, and so is what a microbatch adds to them.
    assert whole.memory.gradients == NUM_PARAMETERS
    assert one.memory.gradients_before == 4 * NUM_PARAMETERS
    assert one.memory.gradients == 2 * 4 * NUM_PARAMETERS
    assert one.memory.parameters == whole.memory.parameters


def test_a_microbatch_pays_its_share_of_what_is_done_once() -> None:
    whole, quarter = sharded(None), sharded(Microbatches(num_in_step=4, num_live=4))
    (forward,) = [w for w in whole.windows if w.name == "layers.0 forward"]
    (of_quarter,) = [w for w in quarter.windows if w.name == "layers.0 forward"]
    assert of_quarter.communication_us == pytest.approx(forward.communication_us / 4)
    assert of_quarter.compute_us == forward.compute_us
    (update,) = [w for w in whole.windows if w.name == "layers.0 optimizer"]
    (of_update,) = [w for w in quarter.windows if w.name == "layers.0 optimizer"]
    assert of_update.compute_us == pytest.approx(update.compute_us / 4)


def test_prices_of_one_microbatch_are_those_of_a_step() -> None:
    one = PlacementPrices(microbatches=Microbatches(num_in_step=1, num_live=1))
    four = PlacementPrices(microbatches=Microbatches(num_in_step=4, num_live=1))
    assert one.digest == PlacementPrices().digest != four.digest


def test_gathered_parameters_are_not_gathered_again() -> None:
    graph = plan().graph
    microbatches = Microbatches(num_in_step=4, num_live=2)
    gathered = gathered_parameters(graph)
    assert {graph.nodes[index].kind for index in gathered} == {"share"}
    for asked, may_run_again in ((None, True), (microbatches, False)):
        statuses = saved_storages(graph, recomputes=True, microbatches=asked).statuses
        again = {index for index, each in statuses.items() if "recomputed" in each}
        assert bool(again & gathered) is may_run_again


def test_the_problem_counts_the_bytes_that_the_plan_does() -> None:
    microbatches = Microbatches(num_in_step=4, num_live=3)
    planner = planner_of_model(model(), MESH, example(), microbatches=microbatches)
    constraints = Constraints(inputs={"x": [S0]})
    found = planner.find(constraints=constraints)
    problem = planner.problem(found.request)
    choices = problem.solution_of(found.options)
    counted = sum(
        float(variable.memory_bytes[0][choice])
        for variable, choice in zip(problem.problem.variables, choices, strict=True)
    )
    assert counted == found.memory.total
    # And a budget binds on them.
    frugal = planner.find(
        constraints=constraints, memory_budget_bytes=int(0.8 * found.memory.total)
    )
    assert frugal.memory.total <= 0.8 * found.memory.total


def test_the_audit_counts_them_anew() -> None:
    found = sharded(Microbatches(num_in_step=4, num_live=3))
    audit_plan(found)
    forgetful = plan_memory(found.graph, found.options, found.mesh, optimizer_state_copies=2.0)
    with pytest.raises(AuditError) as error:
        audit_plan(dataclasses.replace(found, memory=forgetful))
    # The sums in full, and once more what one microbatch adds to them.
    assert "gradients take 67,108,864 bytes, planned as 8,388,608" in str(error.value)
    assert "saved activations take" in str(error.value)


def test_a_gradient_is_summed_where_it_is_computed() -> None:
    graph = plan().graph
    sums = accumulated_gradients(graph)
    assert len(sums) == len(graph.of_kind("gradient"))
    assert {graph.nodes[value.node].name.rpartition("/")[2] for value in sums} == {"mm"}
    assert set(sums.values()) == {4}


def test_graphs_that_take_turns_count_a_part_of_what_only_the_running_one_has() -> None:
    alone, one_of_two = (
        sharded(Microbatches(num_in_step=4, num_live=1, num_graphs=number)) for number in (1, 2)
    )
    audit_plan(one_of_two)
    sums = alone.memory.gradients_before
    assert one_of_two.memory.gradients_before == sums
    assert alone.memory.gradients == 2 * sums
    assert one_of_two.memory.gradients == sums + sums // 2
    assert one_of_two.memory.saved_activations == alone.memory.saved_activations


@pytest.mark.parametrize(("count", "live"), [(0, 0), (4, 0), (4, 5)])
def test_refuses_counts_that_cannot_be(count: int, live: int) -> None:
    with pytest.raises(PlacementInputError) as error:
        Microbatches(num_in_step=count, num_live=live)
    assert str(error.value) == (
        f"num_live is {live} of {count} microbatches in a step; allowed: from 1 to as many as "
        "there are"
    )
