"""What runs on the workers: runs that report some of their steps, and a device that is late."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from training_cases import Case

from gt_trainer import device_transfer, trainer
from gt_trainer.device_transfer import HostCopy
from gt_trainer.metrics.metrics_history import read_metrics
from gt_trainer.steps import step_check
from gt_trainer.steps.step_check import NonFiniteGradientsError, NonFiniteLossError
from gt_trainer.trainer import GraphTrainer

MEASURED = {"seconds", "tokens_per_second", "memory_gib"}


class PoisonedTrainer(GraphTrainer):
    """In one step something is not a number: a gradient's element of the last rank, or the loss."""

    poisoned_step = 0
    poison: Literal["gradient", "loss"] = "gradient"
    late_device: LateDevice | None = None

    def forward_backward_step(self, **inputs: Any) -> torch.Tensor:
        if self.late_device is not None:
            self.late_device.catch_up()
        loss = super().forward_backward_step(**inputs)
        if self.step != self.poisoned_step:
            return loss
        if self.poison == "loss":
            return loss * float("nan")
        if dist.get_rank() == dist.get_world_size() - 1:
            first = next(self.model_parts[0].parameters())
            assert first.grad is not None
            device_transfer.local_part(first.grad).view(-1)[0] = float("nan")
        return loss


class ScalarReads(TorchDispatchMode):
    """Counts tensors that became Python numbers, for each of which a device would be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class LateEvent:
    """An event that the device reaches when it is waited for, or has caught up."""

    def __init__(self) -> None:
        self.is_reached = False
        self.num_waits = 0

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        self.num_waits += not self.is_reached
        self.is_reached = True


class LateDevice:
    """Copies to the host arrive when the next step's forward has been asked for."""

    def __init__(self) -> None:
        self._events: list[LateEvent] = []

    @property
    def num_waits(self) -> int:
        return sum(event.num_waits for event in self._events)

    def catch_up(self) -> None:
        for event in self._events:
            event.is_reached = True

    def copy_to_host(self, values: Mapping[str, torch.Tensor]) -> HostCopy:
        there = device_transfer.copy_to_host(values)
        self._events.append(LateEvent())
        return HostCopy(names=there.names, numbers=there.numbers, copied=self._events[-1])


@contextmanager
def late_device() -> Iterator[LateDevice]:
    """The trainers inside train on a device that is late, if they are told of it."""
    late = LateDevice()
    with (
        mock.patch.object(trainer, "copy_to_host", late.copy_to_host),
        mock.patch.object(step_check, "copy_to_host", late.copy_to_host),
    ):
        yield late


def new_trainer(
    case: Case, folder: str, *, log_freq: int, mode: str = "none", **checkpoint: Any
) -> PoisonedTrainer:
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
    config = case.build(mode, folder, **checkpoint)
    config.metrics.log_freq = log_freq
    return PoisonedTrainer(config)


def records_of(case: Case, folder: str, log_freq: int) -> list[dict[str, Any]]:
    """Train; what metrics.jsonl says afterwards (rank 0), without what a clock measured."""
    trained = new_trainer(case, folder, log_freq=log_freq)
    trained.train()
    trained.close()
    gc.collect()
    return records_in(folder) if dist.get_rank() == 0 else []


def records_in(folder: str) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if name not in MEASURED}
        for record in read_metrics(Path(folder, "metrics.jsonl"))
    ]


def scalar_reads_by_step(case: Case, folder: str, log_freq: int, mode: str) -> dict[int, int]:
    """How many numbers the steps after the first one read off tensors."""
    trained = new_trainer(case, folder, log_freq=log_freq, mode=mode)
    batches = trained.batch_generator(trained.dataloader)
    counts = {}
    for step in range(1, 5):
        trained.step = step
        with ScalarReads() if step > 1 else mock.MagicMock(count=0) as reads:
            trained.train_step(batches)
        counts[step] = reads.count
    trained.close()
    gc.collect()
    del counts[1]  # captures
    return counts


def waits_of_a_late_device(case: Case, folder: str, log_freq: int) -> list[int]:
    """Of four steps, how often each waited for a device that is always a step behind."""
    with late_device() as late:
        trained = new_trainer(case, folder, log_freq=log_freq)
        trained.late_device = late
        batches = trained.batch_generator(trained.dataloader)
        waits = []
        for step in range(1, 5):
            trained.step = step
            before = late.num_waits
            trained.train_step(batches)
            waits.append(late.num_waits - before)
        trained.close()
    gc.collect()
    return waits


def poisoned(
    case: Case,
    folder: str,
    step: int,
    is_late: bool,
    checkpoint_interval: int | None = None,
    poison: Literal["gradient", "loss"] = "gradient",
) -> tuple[str, list[str], list[int]]:
    """Train until gradients or the loss are not finite.

    Args:
        case: the configuration.
        folder: its dump folder.
        step: whose they are.
        is_late: whether the device is a step behind.
        checkpoint_interval: steps between checkpoints; None for no checkpoints at all.
        poison: what is not finite.

    Returns:
        The error, the checkpoints there are, and the steps of metrics.jsonl.
    """
    checkpoint: dict[str, Any] = {}
    if checkpoint_interval is not None:
        checkpoint = {"enable": True, "interval": checkpoint_interval}
    with late_device() if is_late else nullcontext() as late:
        trained = new_trainer(case, folder, log_freq=10, **checkpoint)
        trained.late_device = late
        trained.poisoned_step, trained.poison = step, poison
        try:
            trained.train()
        except (NonFiniteGradientsError, NonFiniteLossError) as error:
            message = str(error)
        else:
            message = "no error"
        trained.close()
    gc.collect()
    dist.barrier()
    saved = sorted(path.name for path in Path(folder, "checkpoint").glob("step-*"))
    steps = [record["step"] for record in records_in(folder)] if dist.get_rank() == 0 else []
    return message, saved, steps
