"""How the measuring process commands the ranks, and what they answer.

Each rank holds one end of a Unix socket. It builds its trainer, makes the first optimizer step,
says so, and then makes one step for each command. Between commands it blocks in a read, so that
several contestants can be alive at once and only the commanded one computes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

__all__ = [
    "CHANNELS_VARIABLE",
    "STARTUP_PARTS",
    "STEP_PARTS",
    "Command",
    "CommandedTraining",
    "StepDone",
    "StepPart",
]

CHANNELS_VARIABLE = "GT_BENCH_CHANNELS"
"""Environment variable: file descriptors of the ranks' sockets, by rank, separated by commas."""

Command = Literal["step", "stop"]

StepPart = Literal["data", "forward_backward", "clip", "optimizer", "metrics"]

STEP_PARTS: tuple[StepPart, ...] = get_args(StepPart)

STARTUP_PARTS = ("imports", "setup", "capture", "passes", "execution")
"""As in our ``startup.json``; "execution" is what the others leave of the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """What a rank says after an optimizer step."""

    loss: float
    """Mean over all ranks' tokens."""
    grad_norm: float
    cpu_seconds: float
    """Processor time of this rank's process: of the step, or for the first one since it began."""
    cpu_parts: dict[StepPart, float]
    """That of the step's parts; what is left is torchtitan's loop and the logging of metrics."""
    startup: dict[str, float] = field(default_factory=dict)
    """Seconds by part, with the first step only."""
    startup_cpu: dict[str, float] = field(default_factory=dict)
    """Processor seconds of this rank's process by part, likewise."""


class CommandedTraining:
    """Mix this in before a torchtitan trainer: ``train`` then steps on command.

    A step is what ``Trainer.train`` does for one: garbage collection at its interval, then
    ``train_step``. The trainer must have ``startup``, a ``StartupClock``.
    """

    timed_functions: ClassVar[Mapping[StepPart, str]] = MappingProxyType(
        {"clip": "torchtitan.distributed.utils:clip_grad_norm_"}
    )
    """Parts of a step that are functions, as module:name of what the trainer calls."""

    def train(self) -> None:
        """Make the first step, report it, and obey until told to stop."""
        trainer: Any = self
        channel = _channel_of_this_rank()
        meter = _StepMeter(trainer)
        batches = meter.timed_batches(trainer.batch_generator(trainer.dataloader))
        trainer.checkpointer.load(step=-1)  # checkpoints are off; the call is part of starting

        def step() -> None:
            trainer.step += 1
            trainer.gc_handler.run(trainer.step)
            trainer.train_step(batches)

        step()
        channel.send(meter.first_done(trainer.startup))
        while True:
            command: Command = channel.recv()
            if command == "stop":
                return
            begin = time.process_time()
            step()
            channel.send(meter.done(since=begin))


def _first_update_parts(clock: Any) -> dict[str, float]:
    """Seconds by part since the measuring process started us; call it after the first update.

    Args:
        clock: A ``gt_trainer.startup.StartupClock``, whose start the measuring process has
        set.
    """
    from gt_trainer.startup import PROCESS_START_VARIABLE

    total = time.time() - float(os.environ[PROCESS_START_VARIABLE])
    return _with_rest(clock.seconds, total)


def _with_rest(seconds: Callable[[str], float], total: float) -> dict[str, float]:
    parts = {name: seconds(name) for name in STARTUP_PARTS[:-1]}
    return {**parts, "execution": total - sum(parts.values())}


def _channel_of_this_rank() -> Connection:
    descriptors = os.environ[CHANNELS_VARIABLE].split(",")
    return Connection(int(descriptors[int(os.environ["RANK"])]))


class _StepMeter:
    """Adds up processor time by part of a step, and catches the loss on its way to the log.

    Five pairs of clock readings a step. What is a function of a module is replaced there; the rest
    are methods of this trainer's own objects.
    """

    def __init__(self, trainer: Any) -> None:
        self._parts: dict[StepPart, float] = {}
        self._logged: tuple[float, float] = (float("nan"), float("nan"))
        trainer.forward_backward_step = self._timed(
            "forward_backward", trainer.forward_backward_step
        )
        for part, path in trainer.timed_functions.items():
            module_name, _, name = path.partition(":")
            module = importlib.import_module(module_name)
            setattr(module, name, self._timed(part, getattr(module, name)))
        if "optimizer" not in trainer.timed_functions:
            trainer.optimizers.step = self._timed("optimizer", trainer.optimizers.step)
        log = self._timed("metrics", trainer.metrics_processor.log)

        @functools.wraps(log)
        def log_and_keep(
            step: int, loss: float, max_loss: float, grad_norm: float, **more: Any
        ) -> None:
            self._logged = (loss, grad_norm)
            log(step, loss, max_loss, grad_norm, **more)

        trainer.metrics_processor.log = log_and_keep

    def timed_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches; making them counts as "data"."""
        while True:
            with self._part("data"):
                batch = next(batches)
            yield batch

    def first_done(self, clock: Any) -> StepDone:
        """What to answer after the first step, of a ``StartupClock``."""
        done = self.done(since=0.0)
        return dataclasses.replace(
            done,
            startup=_first_update_parts(clock),
            startup_cpu=_with_rest(clock.cpu_seconds, done.cpu_seconds),
        )

    def done(self, *, since: float) -> StepDone:
        """What to answer now; the next step starts from zero."""
        parts, self._parts = self._parts, {}
        loss, grad_norm = self._logged
        return StepDone(
            loss=loss,
            grad_norm=grad_norm,
            cpu_seconds=time.process_time() - since,
            cpu_parts=parts,
        )

    def _timed(self, part: StepPart, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._part(part):
                return function(*args, **kwargs)

        return timed

    @contextlib.contextmanager
    def _part(self, part: StepPart) -> Iterator[None]:
        begin = time.process_time()
        try:
            yield
        finally:
            self._parts[part] = self._parts.get(part, 0.0) + time.process_time() - begin
