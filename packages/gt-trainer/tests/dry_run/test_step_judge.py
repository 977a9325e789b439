"""The best plan yet of a search is in a file, whenever the search is ended; some are no plans."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from gt_autoparallel import JudgedStep, UnrunnablePlanError
from gt_config import AutoParallelConfig
from gt_passes.errors import GraphChunkingError
from gt_trainer.device import intended_for
from gt_trainer.dry_run import step_judge
from gt_trainer.trainer import GraphTrainer


def judged(steps, monkeypatch):
    """What is in the file while each plan is simulated, and at the end.

    Plans are the names of ``steps``.
    """
    in_file = []
    monkeypatch.setattr(
        step_judge, "write_plan", lambda plan, path: in_file.__setitem__(slice(None), [plan, path])
    )
    seen = []

    def judge(plan):
        seen.append(in_file[0])
        return steps[plan]

    new_judge = step_judge.keeping_the_best(lambda dims, mesh: judge, Path("best"))
    keeping = new_judge(SimpleNamespace(), SimpleNamespace())
    assert [keeping(plan) for plan in steps] == list(steps.values())
    assert in_file[1] == Path("best")
    return [*seen, in_file[0]]


def step(ms, *, fits=True):
    return JudgedStep(step_us=1e3 * ms, peak_bytes=1, fits=fits)


def test_the_first_plan_is_kept_before_it_is_simulated_and_a_better_one_after(monkeypatch):
    steps = {"planner": step(5), "FSDP": step(6), "TP": step(4)}
    assert judged(steps, monkeypatch) == ["planner", "planner", "planner", "TP"]


def test_what_fits_is_better_than_what_does_not(monkeypatch):
    steps = {"planner": step(5, fits=False), "FSDP": step(6), "TP": step(1, fits=False)}
    assert judged(steps, monkeypatch) == ["planner", "planner", "FSDP", "FSDP"]


def test_a_plan_without_a_step_is_not_kept(monkeypatch, tmp_path):
    path = tmp_path / "best"
    monkeypatch.setattr(step_judge, "write_plan", lambda plan, path: path.write_text(plan))
    in_file = []

    def judge(plan):
        in_file.append(path.read_text())
        if plan != "FSDP":
            raise UnrunnablePlanError("in no chunks")
        return step(1)

    new_judge = step_judge.keeping_the_best(lambda dims, mesh: judge, path)
    keeping = new_judge(SimpleNamespace(), SimpleNamespace())
    with pytest.raises(UnrunnablePlanError, match=r"^in no chunks$"):
        keeping("planner")
    assert not path.exists()
    keeping("FSDP")
    with pytest.raises(UnrunnablePlanError, match=r"^in no chunks$"):
        keeping("TP")
    assert in_file == ["planner", "FSDP", "FSDP"]
    assert path.read_text() == "FSDP"


def test_who_judges_nothing_keeps_nothing():
    assert step_judge.keeping_the_best(None, Path("best")) is None


def test_a_plan_whose_step_cannot_run_in_chunks_is_not_to_be_taken(monkeypatch):
    for name in ("meta_model", "place_by_plan", "expert_blocks", "step_of_placed", "SharedPlan"):
        monkeypatch.setattr(step_judge, name, lambda *args, **kwargs: Mock())

    def simulate(step):
        raise GraphChunkingError(
            ["exp (aten.exp.default) in the forward of layers.0: no", "others"]
        )

    config = GraphTrainer.Config()
    config.compile = replace(config.compile, autoparallel=True)
    new_judge = step_judge.step_judge(config, simulate)
    assert new_judge is not None
    with pytest.raises(UnrunnablePlanError) as error:
        new_judge(Mock(), Mock())(Mock())
    assert str(error.value) == (
        "its step cannot run in the chunks of --compile.ep_overlap.enabled: exp "
        "(aten.exp.default) in the forward of layers.0: no; others"
    )


def judged_options_of(**compile_options):
    config = GraphTrainer.Config()
    config.compile = replace(config.compile, autoparallel=True, **compile_options)
    return step_judge.config_for_judging(config)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_plans_are_judged_alike_whatever_runs_on_the_captured_step(device):
    with intended_for(device):
        native = judged_options_of()
        for afterwards in (
            {"inductor_compilation": "autoparallel_backend"},
            {"inductor_compilation": "full", "cuda_graphs": True},
            {"fsdp_bucketing": "off", "prefetch_layers": 0, "memory_policy": "full_recompute"},
            {"disable_passes": ("bucket-all-gathers",), "passes": ("cuda-graphs",)},
            {"mode": "none"},
        ):
            assert judged_options_of(**afterwards) == native
        assert native.compile.inductor_compilation == ("none" if device == "cpu" else "regional")


def test_plans_are_judged_by_what_shapes_the_captured_step():
    solver = AutoParallelConfig(memory_budget_gib=3.0)
    shapes = {"autoparallel_solver": solver, "accumulation": "reduce_once"}
    with intended_for("cuda"):
        judged = judged_options_of(**shapes).compile
    assert {name: getattr(judged, name) for name in shapes} == shapes
    assert not judged.cuda_graphs  # which a step of several microbatches cannot have
