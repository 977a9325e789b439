"""Every private torch symbol that gt_trainer uses, each with the reason."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["flex_attention_on_any_device", "is_cuda_lost_by_fork"]


@contextmanager
def flex_attention_on_any_device() -> Iterator[None]:
    """Let a step with FlexAttention be traced for a GPU on a machine without one.

    ``torch.nn.attention.flex_attention`` refuses CPU tensors that need a gradient, because Inductor
    has no backward for them; fake tensors of a dry run are on the CPU, for autograd cannot run over
    fake tensors of a CUDA device that is not there. Nothing public lifts that check.
    """
    module: Any = importlib.import_module("torch.nn.attention.flex_attention")
    check = module._validate_device
    module._validate_device = lambda *_: None
    try:
        yield
    finally:
        module._validate_device = check


def is_cuda_lost_by_fork() -> bool:
    """Say whether this process was forked from one that had initialised the CUDA driver.

    False on a machine without a CUDA device, where asking for one initialises nothing.

    ``torch.cuda.is_initialized`` tells of PyTorch's context only. The driver is initialised
    earlier, by counting devices, and torch keeps a note of that for forked children alone; no
    public function reads it before the first use of CUDA fails.
    """
    return bool(torch.cuda._is_in_bad_fork()) and torch.cuda.device_count() > 0
