"""`metrics.jsonl` as a file: exact, strict JSON, one coherent history."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gt_trainer.metrics.metrics_history import (
    MetricsFileError,
    MetricsHistory,
    MetricsHistoryError,
    StepMetrics,
    check_writable,
    read_metrics,
)


def refuse_constant(name: str) -> float:
    raise AssertionError(f"{name} is not JSON")


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read_metrics(path)]


def write_steps(path: Path, *numbers: int, loss: float = 1.0) -> None:
    history = MetricsHistory(path)
    for number in numbers:
        history.write({"step": number, "loss": loss})
    history.close()


@given(st.lists(st.floats(), min_size=1, max_size=5))
def test_floats_come_back_to_the_last_bit_from_strict_json(
    tmp_path_factory: pytest.TempPathFactory, losses: list[float]
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    history = MetricsHistory(path)
    for number, loss in enumerate(losses, start=1):
        history.write({"step": number, "loss": loss})
    history.close()
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=refuse_constant)
    assert [repr(record["loss"]) for record in read_metrics(path)] == [repr(x) for x in losses]


def test_non_finite_numbers_are_strings_that_float_understands(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    history = MetricsHistory(path)
    history.write({"step": 1, "loss": math.inf, "grad_norm": math.nan, "lr": -math.inf})
    assert path.read_text() == (
        '{"step": 1, "loss": "Infinity", "grad_norm": "NaN", "lr": "-Infinity"}\n'
    )
    record = json.loads(path.read_text())
    assert float(record["loss"]) == math.inf
    assert math.isnan(float(record["grad_norm"]))


def test_each_line_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    history = MetricsHistory(path)
    for number in (1, 2, 3):
        history.write({"step": number})
        assert steps(path) == list(range(1, number + 1))


def test_nothing_is_touched_before_the_first_record(tmp_path: Path) -> None:
    write_steps(tmp_path / "metrics.jsonl", 1, 2)
    MetricsHistory(tmp_path / "metrics.jsonl").close()
    MetricsHistory(tmp_path / "new" / "metrics.jsonl").close()
    assert steps(tmp_path / "metrics.jsonl") == [1, 2]
    assert not (tmp_path / "new").exists()


def test_resuming_keeps_earlier_steps_and_drops_later_ones(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 2, 3, 4, 5, loss=1.0)
    history = MetricsHistory(path)
    history.resume(after_step=3)
    assert steps(path) == [1, 2, 3]
    history.write({"step": 4, "loss": 2.0})
    assert [record["loss"] for record in read_metrics(path)] == [1.0, 1.0, 1.0, 2.0]


def test_first_record_drops_what_it_replaces_without_being_told(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 2, 3, 4, 5)
    write_steps(path, 4)
    assert steps(path) == [1, 2, 3, 4]
    write_steps(path, 1)
    assert steps(path) == [1]


def test_closing_and_writing_again_continues(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    history = MetricsHistory(path)
    history.write({"step": 1})
    history.close()
    history.write({"step": 2})
    assert steps(path) == [1, 2]


def test_torn_last_line_of_a_killed_run_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 2)
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    history = MetricsHistory(path)
    history.resume(after_step=2)
    history.write({"step": 3})
    assert steps(path) == [1, 2, 3]


def test_failed_rewrite_leaves_the_old_history_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 2, 3)
    before = path.read_bytes()

    def fail(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(MetricsFileError) as error:
        MetricsHistory(path).resume(after_step=1)
    assert str(error.value) == (
        f"cannot write {str(path)!r} (No space left on device); choose another --dump_folder"
    )
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("line", ["not json", "[1, 2]", '{"loss": 1.0}', '{"step": "1"}'])
def test_refuses_to_continue_a_file_that_is_not_ours(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(MetricsHistoryError) as error:
        MetricsHistory(path).resume(after_step=1)
    assert str(error.value) == (
        f"{str(path)!r}, line 2 is not a metrics record: {line!r}; move the file away, or choose "
        "another --dump_folder"
    )
    assert path.read_text() == f'{{"step": 1}}\n{line}\n'


def test_refuses_a_record_without_a_step(tmp_path: Path) -> None:
    with pytest.raises(MetricsHistoryError, match="needs an integer step; it has None"):
        MetricsHistory(tmp_path / "metrics.jsonl").write({"loss": 1.0})


def test_refuses_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(MetricsFileError) as error:
        check_writable(blocked / "outputs")
    assert str(error.value) == (
        f"cannot write {str(blocked / 'outputs')!r} (Not a directory); choose another --dump_folder"
    )
    assert isinstance(error.value, OSError)


def test_checking_a_folder_leaves_nothing_in_it(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_record_has_the_known_fields_in_order() -> None:
    metrics = StepMetrics(step=3, loss=2.5, grad_norm=0.1, lr=1e-3)
    assert list(metrics.to_record().items()) == [
        ("step", 3),
        ("loss", 2.5),
        ("grad_norm", 0.1),
        ("lr", 1e-3),
    ]


def test_reading_a_history_needs_no_torch() -> None:
    code = "import gt_trainer.metrics.metrics_history, sys; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout == "False\n"
