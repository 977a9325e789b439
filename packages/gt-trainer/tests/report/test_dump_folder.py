"""What is read of a dump folder, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gt_trainer.report.dump_folder import LinkedFile, ReportError, read_run


def write_lines(path: Path, *records: object) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))


def test_a_folder_with_metrics_alone_is_a_run(tmp_path: Path):
    write_lines(tmp_path / "metrics.jsonl", {"step": 1, "loss": "NaN", "grad_norm": 1.0})
    run = read_run(tmp_path)
    assert [each["step"] for each in run.steps] == [1]
    assert run.steps[0]["loss"] != run.steps[0]["loss"]
    assert (run.validations, run.starts, run.startup, run.captures) == ([], [], {}, [])
    assert (run.restarts, run.files) == ((), ())


def test_starts_after_the_first_are_restarts(tmp_path: Path):
    write_lines(tmp_path / "metrics.jsonl", {"step": 1, "loss": 1.0})
    write_lines(tmp_path / "starts.jsonl", *({"step": step, "time": 0.0} for step in (1, 5, 9)))
    assert read_run(tmp_path).restarts == (5, 9)


def test_files_that_have_more_to_say_are_found(tmp_path: Path):
    write_lines(tmp_path / "metrics.jsonl", {"step": 1, "loss": 1.0})
    for path in ("profiling/traces/iteration_10/rank0_trace.json", "logs/rank_1.log", "else.txt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert read_run(tmp_path).files == (
        LinkedFile(
            path="profiling/traces/iteration_10/rank0_trace.json",
            meaning="profiler trace: open in ui.perfetto.dev",
        ),
        LinkedFile(path="logs/rank_1.log", meaning="what a rank said"),
    )


def test_a_folder_of_no_run_is_refused(tmp_path: Path):
    with pytest.raises(ReportError) as error:
        read_run(tmp_path)
    assert str(error.value) == (
        f"{str(tmp_path)!r} has no metrics.jsonl: give the --dump_folder of a run that has "
        "trained a step"
    )


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("startup.json", "{", "startup.json is not JSON ("),
        ("captures.json", "{}", "captures.json is not what a run writes"),
        ("captures.json", "[1]", "captures.json is not what a run writes"),
        ("starts.jsonl", '{"step": 1}\n', "starts.jsonl is not what a run writes"),
        ("starts.jsonl", "nothing\n", "line 1 is not a metrics record: 'nothing'"),
    ],
)
def test_a_file_that_no_run_wrote_is_named(name: str, text: str, reason: str, tmp_path: Path):
    write_lines(tmp_path / "metrics.jsonl", {"step": 1, "loss": 1.0})
    (tmp_path / name).write_text(text)
    with pytest.raises(ReportError) as error:
        read_run(tmp_path)
    assert str(error.value).startswith(f"the run in {str(tmp_path)!r} cannot be read: ")
    assert reason in str(error.value)
