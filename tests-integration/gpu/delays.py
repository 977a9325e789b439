"""Delays on the device, which make a missing wait visible: who should wait and does not comes first.

Without them a race goes unseen, because the producer is done long before anybody reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from gt_passes import declare_pure_operator
from gt_passes.analysis import host_copies

_CYCLES = 20_000_000
"""About a hundredth of a second: longer than all that a case computes."""

_library = torch.library.Library("gpu_cases", "DEF")
_library.define("delayed(Tensor value) -> Tensor", tags=(torch.Tag.pointwise,))
declare_pure_operator("gpu_cases::delayed")


@torch.library.impl(_library, "delayed", "CompositeExplicitAutograd")
def _delayed(value: torch.Tensor) -> torch.Tensor:
    sleep(value.device)
    return value.clone()


torch.library.register_fake("gpu_cases::delayed", lambda value: value.clone(), lib=_library)

delayed = torch.ops.gpu_cases.delayed.default
"""``delayed(value)``: a copy of the value, which a GPU makes late."""


def sleep(device: torch.device) -> None:
    """Keep the current stream of a GPU busy; nothing on a CPU, where all is done when it returns."""
    if device.type == "cuda":
        torch.cuda._sleep(_CYCLES)


@contextmanager
def slow_host_copies() -> Iterator[list[int]]:
    """Let every copy between a GPU and host memory arrive late, on its stream.

    Yields a list whose one item counts the copies.
    """
    start_copy = host_copies._start_copy
    num_copies = [0]

    def start_late(
        destination: torch.Tensor, source: torch.Tensor, *, device: torch.device
    ) -> None:
        num_copies[0] += 1
        current = torch.accelerator.current_stream(device)
        if device not in host_copies._streams:
            host_copies._streams[device] = torch.Stream(device=device)
        stream = host_copies._streams[device]
        stream.wait_stream(current)  # a recording follows to streams that are forked from its own
        torch.accelerator.set_stream(stream)
        try:
            sleep(device)
        finally:
            torch.accelerator.set_stream(current)
        start_copy(destination, source, device=device)

    with mock.patch.object(host_copies, "_start_copy", start_late):
        yield num_copies
