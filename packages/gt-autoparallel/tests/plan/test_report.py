"""Reports say the same every time, with repeated layers in one row."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_doubles import DDP, FSDP, S0, TENSOR_PARALLEL, R, plan_by_hand

from gt_autoparallel.plan.layer_ranges import ranged_rows
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.plan.report import plan_report
from gt_autoparallel.problem.constraints import ResolvedRequest

GOLDEN = """\
Placement on dp 2 x tp 2 (4 ranks)
  cost of a step      11.8 us (simulated)
  no plan costs less  11.8 us: a proven optimum (by hand)
  memory of a rank    3.25 KiB, of a budget of 1.00 MiB
  problem             19 nodes, 19 choices, 76 options

Parameters
  parameter        shape            dp    tp    on each rank
  layers.0.weight  float32[16, 16]  S(0)  S(1)         256 B
  layers.1.weight  float32[16, 16]  S(1)  S(0)         256 B

Inputs and outputs
  kind    name    shape           dp    tp
  input   x       float32[8, 16]  S(0)  R
  output  output  float32[8, 16]  S(0)  R

Collectives of a step
  purpose          collective      axis  count  on each rank
  activation       all_reduce      tp        1         256 B
  reduce gradient  reduce_scatter  dp        2      1.00 KiB
  unshard          all_gather      dp        2      1.00 KiB

Time (simulated)
  window                         compute  communication  of it exposed
  layers.0-1 optimizer            2.1 us         0.0 us         0.0 us
  layers.0 forward                1.0 us         0.4 us         0.0 us
  layers.1 forward                1.1 us         0.4 us         0.0 us
  layers.1 backward               4.3 us         0.4 us         0.0 us
  layers.0 backward               2.2 us         0.4 us         0.0 us
  parameters, in full, forward    0.0 us         0.3 us         0.3 us
  activations, forward            0.0 us         0.5 us         0.5 us
  parameters, in full, backward   0.0 us         0.3 us         0.3 us
  all                            10.7 us         2.6 us         1.0 us
  Parameters and gradients move while their window computes; activations and copies do not.

Memory of each rank
  what               on each rank
  parameters                512 B
  gradients                 256 B
  optimizer state        1.00 KiB
  saved activations         512 B
  in flight              1.00 KiB
  all                    3.25 KiB
  Most is there where a layer's gradients are reduced; in the backward it is 2.38 KiB.
"""


@pytest.fixture(scope="module")
def plan() -> PlacementPlan:
    request = ResolvedRequest(memory_budget_bytes=2**20)
    return plan_by_hand(("dp", 2, FSDP), ("tp", 2, TENSOR_PARALLEL), request=request)


def test_the_whole_report(plan):
    assert str(plan_report(plan)) == GOLDEN


def test_alike_layers_stand_in_one_row_and_count_all_their_bytes():
    plan = plan_by_hand(("dp", 4, DDP))
    table = plan_report(plan).tables[0]
    assert table.rows == (("layers.0-1.weight", "float32[16, 16]", "R", "2.00 KiB"),)


def test_names_of_layers_become_ranges():
    names = [*(f"layers.{i}.w" for i in (0, 1, 2, 5, 7, 8)), "norm.weight"]
    rows = ranged_rows([(name, "same") for name in names])
    assert [(row.name, row.count) for row in rows] == [
        ("layers.0-2,5,7-8.w", 6),
        ("norm.weight", 1),
    ]
    rows = ranged_rows([("layers.0.w", S0), ("layers.1.w", R), ("layers.2.w", S0)])
    assert [row.name for row in rows] == ["layers.0,2.w", "layers.1.w"]
    # Experts are no layers; a phase and an operator may follow a layer.
    rows = ranged_rows((f"l.{i}.e.{i}.w forward", 0) for i in (0, 1))
    assert [row.name for row in rows] == ["l.0.e.0.w forward", "l.1.e.1.w forward"]
    for name in ("layers.{} forward", "layers.{}/mm", "{}", "{}.w", "layers.{}.a/grad/mm_1"):
        (row,) = ranged_rows((name.format(i), 0) for i in range(3))
        assert row.name == name.format("0-2")


def test_lists_what_is_replicated_by_request(plan):
    assert "no rule knows" not in str(plan_report(plan))
    changed = replace(plan, replicated_nodes=("mm0", "mm1"))
    text = str(plan_report(changed))
    assert (
        "Replicated because no rule knows them, as the request allowed\n"
        "  node  operator\n"
        "  mm0   aten.mm.default\n"
        "  mm1   aten.mm.default\n"
    ) in text


def test_says_how_far_an_unproven_plan_may_be_off(plan):
    solver = replace(
        plan.solver,
        proven=False,
        lower_bound_us=plan.objective_us * 0.98,
        memory_price_us_per_gib=12.5,
    )
    summary = dict(plan_report(replace(plan, solver=solver)).summary)
    assert summary["no plan costs less"] == "11.5 us: at most 2.04% above the optimum (by hand)"
    assert summary["one GiB more"] == "would save 12.5 us at the margin"
    # A plan of twice the bound is 100 % above it, though its gap is 50 %.
    solver = replace(solver, lower_bound_us=solver.objective_us / 2)
    summary = dict(plan_report(replace(plan, solver=solver)).summary)
    assert summary["no plan costs less"] == "5.9 us: at most 100.00% above the optimum (by hand)"
    solver = replace(solver, lower_bound_us=0.0)
    summary = dict(plan_report(replace(plan, solver=solver)).summary)
    assert summary["no plan costs less"] == (
        "0.0 us: how far the plan is above the optimum is not known (by hand)"
    )


def test_buffers_of_alike_layers_stand_in_one_row(plan):
    cache = next(node for node in plan.graph.nodes if node.kind == "input")
    caches = [
        replace(cache, index=cache.index, kind="buffer", target=f"layers.{layer}.rope.cache")
        for layer in range(32)
    ]
    graph = replace(plan.graph, nodes=(*caches, *plan.graph.nodes))
    table = plan_report(replace(plan, graph=graph, options=plan.options)).tables[1]
    assert [row[:2] for row in table.rows if row[0] == "buffer"] == [
        ("buffer", "layers.0-31.rope.cache")
    ]
