"""torchtitan's metrics processor, with `metrics.jsonl` and our progress display added.

torchtitan computes the metrics of a step and hands them to its loggers (TensorBoard, Weights &
Biases): ours is one more of those, so nothing is computed twice and TensorBoard stays as
torchtitan has it. torchtitan's own line a step is left out of the log: the display says it.
"""

import contextlib
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.components import metrics as titan_metrics
from torchtitan.components.metrics import BaseLogger, LoggerContainer, MetricsProcessor
from torchtitan.tools.logging import logger as titan_logger
from torchtitan.tools.utils import NoColor

from gt_trainer.device_transfer import HostCopy
from gt_trainer.metrics.metrics_history import (
    METRICS_FILE,
    VALIDATION_FILE,
    MetricsHistory,
    StepMetrics,
    check_writable,
)
from gt_trainer.metrics.progress_display import (
    DisplayMode,
    ProgressDisplay,
    SilentDisplay,
    open_progress_display,
)
from gt_trainer.pipelines.pipeline_plan import rank_with_loss


class GraphMetricsProcessor(MetricsProcessor):
    """Logs as torchtitan does, writes `metrics.jsonl` and drives the progress display.

    The rank that sees the loss (rank 0 without pipeline parallelism) writes and displays; the
    others do neither. Validation losses go to `validation.jsonl`, so that `metrics.jsonl` is one
    object a step.

    Raises:
        MetricsFileError: The dump folder cannot be written.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """What is logged, and where."""

        log_freq: int = 1
        """How often to report metrics, in steps; on a GPU, which then waits for the host.
        metrics.jsonl has every step all the same."""

        jsonl: bool = True
        """Write metrics.jsonl and validation.jsonl into the dump folder."""

        display: DisplayMode = "auto"
        """Progress: a live panel on a terminal and plain lines elsewhere ("auto"), or either
        everywhere, or "off"."""

    display: ProgressDisplay
    """Where the trainer says what it is busy with."""

    def __init__(self, config: Config, **options: Any) -> None:
        """As torchtitan's; its log lines have colors on a terminal only."""
        super().__init__(config, **options)
        if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
            self.color = NoColor()

    def training_starts(self, *, after_step: int) -> None:
        """Say that the next step is `after_step` + 1: call it after a checkpoint was loaded.

        Drops what an earlier run wrote about later steps, and starts the clock of the first
        step. Without it both happen at the first report, which is as good with `log_freq` 1.

        Raises:
            MetricsFileError: A file cannot be written.
            MetricsHistoryError: A file in the dump folder is not one of ours.
        """
        self._reports.training_starts(after_step=after_step)
        self.time_last_log = time.perf_counter()
        self.ntokens_since_last_log = 0

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Report an optimizer step, as torchtitan's Trainer calls it."""
        with _without_line_of("log"):
            super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)

    def log_later(self, step: int, numbers: HostCopy, learning_rates: Mapping[str, float]) -> None:
        """Take a step that is not reported, for metrics.jsonl. Waits for nothing.

        Args:
            step: The next one, from 1.
            numbers: "loss", "max_loss", "grad_norm" and "n_tokens_seen", as of ``StepMetrics``.
            learning_rates: As torchtitan names them.
        """
        self._reports.log_later(step, numbers, learning_rates)

    def write_due(self) -> None:
        """Write all that ``log_later`` took, waiting for it: before the run is saved, say."""
        self._reports.write_due(wait=True)

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        """Report a validation pass, as torchtitan's Validator calls it."""
        with _without_line_of("log_validation"):
            super().log_validation(loss, step, extra_metrics)

    def _build_metric_logger(
        self,
        *,
        config: MetricsProcessor.Config,
        dump_folder: str = "./outputs",
        config_dict: dict[str, Any] | None = None,
        **options: Any,
    ) -> BaseLogger:
        """Add our reports to the loggers that the configuration asks torchtitan for."""
        assert isinstance(config, GraphMetricsProcessor.Config)
        theirs = super()._build_metric_logger(
            config=config, dump_folder=dump_folder, config_dict=config_dict, **options
        )
        parallel_dims = options["parallel_dims"]
        metrics_rank = rank_with_loss(
            schedule=options["pp_schedule"],
            csv_path=((config_dict or {}).get("parallelism") or {}).get(
                "pipeline_parallel_schedule_csv"
            ),
            pipeline_degree=parallel_dims.pp,
            world_size=parallel_dims.world_size,
        )
        rank = dist.get_rank() if dist.is_initialized() else 0
        if rank == metrics_rank:
            if config.jsonl:
                check_writable(dump_folder)
            self.display = open_progress_display(
                total_steps=(config_dict or {}).get("training", {}).get("steps"),
                mode=config.display,
                color=not config.disable_color_printing,
            )
        else:
            self.display = SilentDisplay()
        self._reports = _Reports(
            display=self.display,
            folder=Path(dump_folder) if config.jsonl and rank == metrics_rank else None,
            num_ranks=parallel_dims.world_size,
            log_freq=config.log_freq,
        )
        loggers = LoggerContainer()
        loggers.add_logger(theirs)
        loggers.add_logger(self._reports)
        return loggers


class _Reports(BaseLogger):
    """Turns what torchtitan hands to its loggers into our records.

    Args:
        display: Shows them.
        folder: Where the files go; None writes none.
        num_ranks: World size.
        log_freq: What torchtitan divided its step time by.
    """

    def __init__(
        self, *, display: ProgressDisplay, folder: Path | None, num_ranks: int, log_freq: int
    ) -> None:
        self._display = display
        self._num_ranks = num_ranks
        self._log_freq = log_freq
        self._last_step: int | None = None
        self._due: deque[_DueStep] = deque()
        self._metrics = None if folder is None else MetricsHistory(folder / METRICS_FILE)
        self._validation = None if folder is None else MetricsHistory(folder / VALIDATION_FILE)

    def training_starts(self, *, after_step: int) -> None:
        self._last_step = after_step
        if self._metrics is not None:
            self._metrics.resume(after_step=after_step)
        if self._validation is not None and self._validation.path.exists():
            self._validation.resume(after_step=after_step)

    def log_later(self, step: int, numbers: HostCopy, learning_rates: Mapping[str, float]) -> None:
        if self._metrics is None:
            return
        self._due.append(_DueStep(step=step, numbers=numbers, lr=_first_rate(learning_rates)))
        self.write_due(wait=False)

    def write_due(self, *, wait: bool) -> None:
        """Write the steps not reported; without `wait`, up to the first still on its way."""
        while self._due and (wait or self._due[0].numbers.is_ready()):
            assert self._metrics is not None
            self._metrics.write(self._due.popleft().metrics().to_record())

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.write_due(wait=True)
        if "validation_metrics/loss" in metrics:
            self._log_validation(float(metrics["validation_metrics/loss"]), step)
            return
        # torchtitan gives the time since the last report divided by log_freq, also where fewer
        # steps passed (after step 1, and after a resume); and tokens a second of one rank.
        since_last = metrics["time_metrics/end_to_end(s)"] * self._log_freq
        num_steps = 1 if self._last_step is None else max(step - self._last_step, 1)
        self._last_step = step
        report = StepMetrics(
            step=step,
            loss=float(metrics["loss_metrics/global_avg_loss"]),
            grad_norm=float(metrics["grad_norm"]),
            max_loss=float(metrics["loss_metrics/global_max_loss"]),
            tokens_per_second=metrics["throughput(tps)"] * self._num_ranks,
            seconds=since_last / num_steps,
            lr=_first_rate(metrics),
            n_tokens_seen=int(metrics["n_tokens_seen"]) if "n_tokens_seen" in metrics else None,
            memory_gib=_known(metrics["memory/max_reserved(GiB)"]),
        )
        if self._metrics is not None:
            self._metrics.write(report.to_record())
        self._display.step(report)

    def _log_validation(self, loss: float, step: int) -> None:
        if self._validation is not None:
            self._validation.write({"step": step, "validation_loss": loss})
        self._display.message(f"validation step={step} validation_loss={loss:.5f}")

    def close(self) -> None:
        # Not waiting: a run that fails may have left a device that never gets there.
        self.write_due(wait=False)
        for file in (self._metrics, self._validation):
            if file is not None:
                file.close()
        self._display.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _DueStep:
    """A step that was not reported. Seconds and memory are measured between reports only."""

    step: int
    numbers: HostCopy
    lr: float | None

    def metrics(self) -> StepMetrics:
        numbers = self.numbers.wait()
        return StepMetrics(
            step=self.step,
            loss=numbers["loss"],
            grad_norm=numbers["grad_norm"],
            max_loss=numbers["max_loss"],
            lr=self.lr,
            n_tokens_seen=int(numbers["n_tokens_seen"]),
        )


def _first_rate(metrics: Mapping[str, Any]) -> float | None:
    """Return the learning rate of the first parameter group, of what torchtitan logs."""
    return next((value for name, value in metrics.items() if name.startswith("lr/")), None)


def _known(memory_gib: float) -> float | None:
    """Return None for a device that does not say (torchtitan: -1 byte, or 0)."""
    return memory_gib if memory_gib > 0 else None


@contextlib.contextmanager
def _without_line_of(function: str) -> Iterator[None]:
    """Keep the line that one of torchtitan's methods logs out of the log, and nothing else."""

    def keep(record: logging.LogRecord) -> bool:
        return record.pathname != titan_metrics.__file__ or record.funcName != function

    titan_logger.addFilter(keep)
    try:
        yield
    finally:
        titan_logger.removeFilter(keep)
