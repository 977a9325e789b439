"""The metrics processor on torchtitan's own: files, log, display, TensorBoard."""

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gt_trainer.device_transfer import HostCopy
from gt_trainer.metrics.metrics_history import MetricsFileError, read_metrics
from gt_trainer.metrics.metrics_jsonl import GraphMetricsProcessor


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(folder: Path, **options: Any) -> GraphMetricsProcessor:
    """A processor of rank 0 of 4, tensor parallel degree 2."""
    config = GraphMetricsProcessor.Config(**{"display": "plain", **options})
    processor: GraphMetricsProcessor = config.build(
        parallel_dims=SimpleNamespace(
            pp=1, pp_enabled=False, world_size=4, non_data_parallel_size=2
        ),
        dump_folder=str(folder),
        pp_schedule="1F1B",
        config_dict={"training": {"steps": 5}},
        has_quantization=False,
    )
    processor.num_flops_per_token = 1000
    return processor


def log_step(processor: GraphMetricsProcessor, step: int, loss: float = 2.5) -> None:
    """As torchtitan's Trainer does at the end of a step."""
    processor.ntokens_since_last_log += 1024
    processor.data_loading_times.append(0.001)
    processor.log(
        step, loss, loss + 0.5, 1.25, extra_metrics={"n_tokens_seen": 2048 * step, "lr/AdamW": 8e-4}
    )


def test_each_step_is_a_record_with_exact_values(tmp_path: Path) -> None:
    processor = build(tmp_path)
    loss = 0.1 + 0.2
    log_step(processor, 1, loss)
    processor.close()
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert {"tokens_per_second", "seconds"} <= set(record)
    del record["tokens_per_second"], record["seconds"]
    assert record.pop("memory_gib", 1.0) > 0
    assert record == {
        "step": 1,
        "loss": loss,
        "grad_norm": 1.25,
        "max_loss": loss + 0.5,
        "lr": 8e-4,
        "n_tokens_seen": 2048,
    }


@pytest.mark.parametrize("on_terminal", [True, False])
def test_titans_lines_have_colors_on_a_terminal_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_terminal: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: on_terminal, raising=False)
    assert bool(build(tmp_path, display="off").color.red) == on_terminal
    monkeypatch.setenv("NO_COLOR", "1")
    assert not build(tmp_path, display="off").color.red


def test_throughput_counts_the_tokens_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    processor = build(tmp_path)
    processor.training_starts(after_step=0)
    clock.now += 4.0
    log_step(processor, 1)
    clock.now += 0.5
    log_step(processor, 2)
    processor.close()
    # 4 ranks are 2 data-parallel ones of 1024 tokens each.
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert (first["seconds"], first["tokens_per_second"]) == (4.0, 512.0)
    assert (second["seconds"], second["tokens_per_second"]) == (0.5, 4096.0)


def test_step_time_is_an_average_over_the_steps_since_the_last_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    processor = build(tmp_path, log_freq=10)
    processor.training_starts(after_step=0)
    for step, seconds in ((1, 5.0), (10, 9.0), (20, 20.0)):
        clock.now += seconds
        log_step(processor, step)
    processor.close()
    assert [record["seconds"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [5, 1, 2]


def test_torchtitans_line_gives_way_to_the_displays_and_other_logging_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    processor = build(tmp_path)
    with caplog.at_level(logging.INFO):
        log_step(processor, 1)
        processor.log_validation(loss=3.5, step=1)
        logging.getLogger().info("something else")
    processor.close()
    assert caplog.messages == ["something else"]
    output = capsys.readouterr().out
    assert "step=1/5 loss=2.50000 grad_norm=1.2500" in output
    assert "validation step=1 validation_loss=3.50000" in output


def test_validation_losses_have_a_file_of_their_own(tmp_path: Path) -> None:
    processor = build(tmp_path)
    log_step(processor, 1)
    assert not (tmp_path / "validation.jsonl").exists()
    processor.log_validation(loss=3.5, step=1)
    log_step(processor, 2)
    processor.close()
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert read_metrics(tmp_path / "validation.jsonl") == [{"step": 1, "validation_loss": 3.5}]


@pytest.mark.parametrize("announced", [True, False])
def test_resumed_run_leaves_one_history(tmp_path: Path, announced: bool) -> None:
    first = build(tmp_path)
    for step in range(1, 6):
        log_step(first, step, loss=1.0)
        first.log_validation(loss=1.0, step=step)
    first.close()
    second = build(tmp_path)
    if announced:
        second.training_starts(after_step=3)
        assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    log_step(second, 4, loss=2.0)
    second.log_validation(loss=2.0, step=4)
    second.close()
    for name, key in (("metrics.jsonl", "loss"), ("validation.jsonl", "validation_loss")):
        records = read_metrics(tmp_path / name)
        assert [(record["step"], record[key]) for record in records] == [
            (1, 1.0),
            (2, 1.0),
            (3, 1.0),
            (4, 2.0),
        ]


class Event:
    """A device's event, reached when the test says so or when it is waited for."""

    def __init__(self) -> None:
        self.is_reached = False

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        self.is_reached = True


def log_later(processor: GraphMetricsProcessor, step: int, event: Event) -> None:
    """As our Trainer does at the end of a step that is not reported."""
    values = {"loss": 0.5 * step, "max_loss": 1.0 * step, "grad_norm": 0.25, "n_tokens_seen": 64.0}
    numbers = torch.tensor([*values.values()], dtype=torch.float64)
    copy = HostCopy(names=tuple(values), numbers=numbers, copied=event)
    processor.log_later(step, copy, {"lr/AdamW": 1e-3})


def steps_in(folder: Path) -> list[int]:
    return [record["step"] for record in read_metrics(folder / "metrics.jsonl")]


def test_steps_between_reports_are_recorded_without_what_is_measured_between_reports(
    tmp_path: Path,
) -> None:
    processor = build(tmp_path, log_freq=3)
    log_step(processor, 1)
    log_later(processor, 2, Event())
    log_step(processor, 3)
    processor.close()
    _, later, _ = read_metrics(tmp_path / "metrics.jsonl")
    assert later == {
        "step": 2,
        "loss": 1.0,
        "grad_norm": 0.25,
        "max_loss": 2.0,
        "lr": 1e-3,
        "n_tokens_seen": 64,
    }
    assert steps_in(tmp_path) == [1, 2, 3]


def test_steps_between_reports_are_not_displayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    processor = build(tmp_path, log_freq=3)
    log_step(processor, 1)
    log_later(processor, 2, Event())
    log_step(processor, 3)
    processor.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step=1/5", "step=3/5"]


def test_numbers_on_their_way_are_written_in_order_once_they_are_there(tmp_path: Path) -> None:
    processor = build(tmp_path, log_freq=10)
    log_step(processor, 1)
    events = [Event(), Event(), Event()]
    log_later(processor, 2, events[0])
    log_later(processor, 3, events[1])
    assert steps_in(tmp_path) == [1]
    events[1].is_reached = True  # not before the second step, whose line comes first
    assert steps_in(tmp_path) == [1]
    events[0].is_reached = True
    log_later(processor, 4, events[2])
    assert steps_in(tmp_path) == [1, 2, 3]
    assert not events[2].is_reached
    processor.close()


@pytest.mark.parametrize("flush", ["report", "validation", "saving"])
def test_reports_validation_and_saving_wait_for_what_is_on_its_way(
    flush: str, tmp_path: Path
) -> None:
    processor = build(tmp_path, log_freq=3)
    log_step(processor, 1)
    event = Event()
    log_later(processor, 2, event)
    if flush == "report":
        log_step(processor, 3)
    elif flush == "validation":
        processor.log_validation(loss=3.5, step=2)
    else:
        processor.write_due()
    assert event.is_reached
    assert steps_in(tmp_path)[:2] == [1, 2]
    processor.close()


def test_closing_writes_what_is_there_and_waits_for_nothing(tmp_path: Path) -> None:
    processor = build(tmp_path, log_freq=10)
    log_step(processor, 1)
    there, missing = Event(), Event()
    log_later(processor, 2, there)
    log_later(processor, 3, missing)
    there.is_reached = True
    processor.close()
    assert steps_in(tmp_path) == [1, 2]
    assert not missing.is_reached


def test_jsonl_can_be_turned_off(tmp_path: Path) -> None:
    processor = build(tmp_path / "run", jsonl=False)
    log_step(processor, 1)
    log_later(processor, 2, Event())
    processor.log_validation(loss=1.0, step=1)
    processor.close()
    assert not (tmp_path / "run").exists()


def test_other_ranks_write_and_show_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    processor = build(tmp_path / "run")
    log_step(processor, 1)
    processor.close()
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_refuses_a_dump_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MetricsFileError, match=r"cannot write '.*/file/run' .Not a directory."):
        build(tmp_path / "file" / "run")


def test_tensorboard_gets_what_torchtitan_gives_it(tmp_path: Path, process_group: None) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    processor = build(tmp_path, enable_tensorboard=True)
    log_step(processor, 1, loss=2.5)
    processor.log_validation(loss=3.5, step=1)
    processor.close()
    (folder,) = (tmp_path / "tb").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    assert events.Scalars("loss_metrics/global_avg_loss")[0].value == 2.5
    assert events.Scalars("validation_metrics/loss")[0].value == 3.5
    assert (tmp_path / "metrics.jsonl").exists()


def test_trainer_announces_phases_through_the_processors_display(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdout = io.StringIO()
    monkeypatch.setattr("sys.stdout", stdout)
    processor = build(tmp_path)
    processor.display.phase("capturing")
    processor.close()
    assert stdout.getvalue() == "phase=capturing\n"


def test_configuration_is_plain_data(tmp_path: Path) -> None:
    config = GraphMetricsProcessor.Config()
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()
    assert (config.log_freq, config.jsonl, config.display) == (1, True, "auto")
