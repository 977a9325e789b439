"""A real plan: audited, stored, loaded for its model and refused for any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plan_doubles import S0
from planned_models import MESH, example, model, plan

from gt_autoparallel.audit import audit_plan
from gt_autoparallel.errors import AuditError, PlanMismatchError
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.plan import plan_report, predicted_collectives, write_report_page
from gt_autoparallel.plan_file import load_plan, write_plan
from gt_passes.simulation import CostModel, h100_sxm


def test_the_solvers_objective_is_the_cost_of_the_whole_graph():
    report = audit_plan(plan())
    assert report.relative_error < 1e-6
    assert report.num_nodes == len(plan().graph.nodes)
    assert len(predicted_collectives(plan())) <= report.num_steps


def test_a_wrong_objective_is_an_error_of_ours():
    solver = replace(plan().solver, objective_us=plan().solver.objective_us * 1.0167)
    with pytest.raises(AuditError, match=r"off by \+1\.670%"):
        audit_plan(replace(plan(), solver=solver))


def test_parameters_have_layouts_and_their_gradients_the_same():
    layouts = plan().parameter_layouts()
    assert list(layouts) == [
        f"layers.{i}.{name}.weight" for i in range(4) for name in ("up", "down")
    ]
    assert plan().gradient_layouts() == layouts


def test_a_stored_plan_loads_for_its_model(tmp_path: Path):
    path = write_plan(plan(), tmp_path / "plan.json")
    loaded = load_plan(path, model(), MESH, example())
    assert loaded == plan()
    assert hash(loaded) == hash(plan())
    assert loaded.graph.interface is not None, "a loaded plan can be applied"
    assert str(plan_report(loaded)) == str(plan_report(plan()))


def test_a_stored_plan_is_refused_for_anything_else(tmp_path: Path):
    path = write_plan(plan(), tmp_path / "plan.json")

    def message(*args: object, **kwargs: object) -> str:
        with pytest.raises(PlanMismatchError) as error:
            load_plan(path, *args, **kwargs)
        return str(error.value)

    other_mesh = MeshShape(names=("dp",), sizes=(2,))
    assert "mesh is dp 2, planned for dp 4" in message(model(), other_mesh, example())
    assert "layers.0.up.weight is" in message(model(256), MESH, example())
    assert "planned for" in message(model(), MESH, example(tokens=128))
    half = message(model(), MESH, example(), compute_dtype=torch.bfloat16)
    assert "nodes, planned for" in half or "node '" in half
    faster = (
        replace(h100_sxm(), hbm_bytes_per_us=1e9)
        if hasattr(h100_sxm(), "hbm_bytes_per_us")
        else None
    )
    if faster is not None:
        assert "other prices" in message(model(), MESH, example(), cost_model=CostModel(faster))


def test_plans_are_equal_if_they_place_alike():
    assert plan() != replace(plan(), options=plan().options[::-1])
    assert plan() == replace(plan(), solver=replace(plan().solver, seconds=99.0))
    assert plan() != "a plan"
    assert plan().layout(plan().graph.nodes[-1].operands[0]) is not None
    uses = plan().steps_of_uses()
    assert uses.keys() == {(r.use.consumer, r.use.position) for r in plan().redistributions}
    (source,) = plan().graph.of_kind("input")
    assert plan().options[source.index].outputs == ((S0,),)


def test_a_plan_writes_its_page(tmp_path: Path):
    page = write_report_page(plan(), tmp_path / "plan.html")
    assert "layers." in page.read_text()
