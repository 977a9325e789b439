"""Between host and device without waiting for the device.

Numbers of a step are read when they are needed, long after they were computed; reading them at once
would leave the device without work until the host has given it the next step's. Batches go the
other way: a copy from memory that is not pinned waits for all that the device has to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor


class CopyEvent(Protocol):
    """What is asked of a device's event, such as ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Say whether the device has got there."""

    def synchronize(self) -> None:
        """Wait until it has."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HostCopy:
    """Numbers on their way from a device to the host."""

    names: tuple[str, ...]
    numbers: torch.Tensor
    """(len(names),) float64 on the host; undefined before ``copied``."""

    copied: CopyEvent | None
    """None if the numbers were on the host all along."""

    def is_ready(self) -> bool:
        """Say whether ``wait`` would return at once; False too on a device that has failed."""
        try:
            return self.copied is None or self.copied.query()
        except torch.AcceleratorError:
            return False

    def wait(self) -> dict[str, float]:
        """Return the numbers by name, exact for up to 53 bits, once they are there."""
        if self.copied is not None:
            self.copied.synchronize()
        return dict(zip(self.names, self.numbers.tolist(), strict=True))


def copy_to_host(values: Mapping[str, torch.Tensor]) -> HostCopy:
    """Begin to copy numbers to the host: one copy, for which the caller does not wait.

    Args:
        values: one-element tensors of any dtype, on one device. They may change afterwards.
    """
    # float64 has every float32 and every count of tokens: what is read is what ``item`` would give.
    numbers = torch.stack([local_part(v).reshape(()).to(torch.float64) for v in values.values()])
    copied: CopyEvent | None = None
    if numbers.device.type != "cpu":
        on_host = torch.empty_like(numbers, device="cpu", pin_memory=True)
        on_host.copy_(numbers, non_blocking=True)
        event = torch.get_device_module(numbers.device).Event()
        event.record()
        numbers, copied = on_host, event
    return HostCopy(names=tuple(values), numbers=numbers, copied=copied)


def send_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor`` on ``device``, copied from pinned memory if it is the host's."""
    if tensor.device.type != "cpu" or device.type == "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part as a plain tensor, without its history."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
