"""Settings of PyTorch and of the thread that decide what operators a step runs.

Python and composite operators read them while a step is traced, so that a graph holds their
consequences: the dtype of a new tensor, the kernel of an attention. Kernels read some of them at
each replay, as in eager execution.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import backends, nn

from gt_trace._torch_internals import function_modes, kernel_settings, saved_tensors_hooks
from gt_trace.capture.stack_traces import line_of_user
from gt_trace.errors import CaptureError

KERNEL_SETTINGS = kernel_settings()
"""How to read and write settings that kernels read when they run, by name."""

ATTENTION_KERNELS = ("flash", "mem_efficient", "math", "cudnn")


def checks_for_nan() -> bool:
    """Return whether each backward raises an error if its result is not a number."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


SETTINGS: Mapping[str, Callable[[], object]] = MappingProxyType(
    {
        "default dtype": torch.get_default_dtype,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
        "torch function modes": function_modes,
        "oneDNN": KERNEL_SETTINGS["oneDNN"][0],
        "cuDNN": KERNEL_SETTINGS["cuDNN"][0],
        "anomaly mode that checks for nan": checks_for_nan,
        "hooks of saved tensors": saved_tensors_hooks,
        "fast path of nn.MultiheadAttention": backends.mha.get_fastpath_enabled,
        **{
            f"attention: {kind}_sdp_enabled": getattr(backends.cuda, f"{kind}_sdp_enabled")
            for kind in ATTENTION_KERNELS
        },
    }
)

Settings = tuple[object, ...]
"""Values of the settings, in their order."""


def settings_now() -> Settings:
    """Return the present values."""
    return tuple([read() for read in SETTINGS.values()])


def named_settings(values: Settings) -> dict[str, str]:
    """Return settings as texts, by name."""
    return {name: setting_text(value) for name, value in zip(SETTINGS, values, strict=True)}


def setting_text(value: object) -> str:
    """Return a value as a message shows it."""
    return (", ".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)


def setting_problems(was: Mapping[str, str], values: Settings) -> list[str]:
    """Return a sentence for each setting that is not as it was."""
    return [
        f"{name}: {now}, and was {was[name]}; set it as it was, or capture again"
        for name, now in named_settings(values).items()
        if was.get(name, now) != now
    ]


ATTENTION: Any = nn.functional.multi_head_attention_forward
"""The torch function that ``nn.MultiheadAttention`` calls where it takes no other path."""


def refuse_modes(line: str = "") -> None:
    """Refuse to capture in ``torch.inference_mode``, or in anomaly mode.

    Raises:
        CaptureError: one is on; the text ends with ``line``, of the user's code.
    """
    problem = ""
    if torch.is_inference_mode_enabled():
        problem = (
            "torch.inference_mode is on, where a trace has other operators than eager execution "
            "runs; use torch.no_grad() instead"
        )
    elif checks_for_nan():
        problem = (
            "torch.autograd.detect_anomaly is on, which checks values of gradients, and tensors "
            "have none while they are captured; turn it off, and check what the step returns"
        )
    if problem:
        raise CaptureError(f"{problem}{':' if line else ''}\n{line}".rstrip())


def refuse_fast_path(operands: Iterable[object]) -> None:
    """Refuse attention that eager execution computes by PyTorch's fast path, which has no trace.

    It is for evaluation without autograd. A torch function mode, as a capture is one, turns it off.

    Args:
        operands: of ``ATTENTION``, which is about to run.

    Raises:
        CaptureError: eager execution takes that path here.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not nn.MultiheadAttention.forward.__code__:
        frame = frame.f_back
    attention = None if frame is None else frame.f_locals["self"]
    if attention is None or attention.training or not attention.batch_first:
        return
    differentiates = any(isinstance(e, torch.Tensor) and e.requires_grad for e in operands)
    if backends.mha.get_fastpath_enabled() and not (differentiates and torch.is_grad_enabled()):
        raise CaptureError(
            f"nn.MultiheadAttention takes PyTorch's fast path here, which has no trace:\n"
            f"{line_of_user()}\nCall torch.backends.mha.set_fastpath_enabled(False) first"
        )
