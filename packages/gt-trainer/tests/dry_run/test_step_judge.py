"""The best plan yet of a search is in a file, whenever the search is ended."""

from pathlib import Path
from types import SimpleNamespace

from gt_autoparallel import JudgedStep
from gt_trainer.dry_run import step_judge


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


def test_who_judges_nothing_keeps_nothing():
    assert step_judge.keeping_the_best(None, Path("best")) is None
