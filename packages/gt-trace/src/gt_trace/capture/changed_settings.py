"""Settings of PyTorch that a step changes: refused where a replay would compute otherwise.

A replay runs the operators of a step, and changes no setting between them. Operators whose kernels
read a changed setting are refused with the line. So is a step that leaves a setting changed.
Settings that only Python reads, such as the choice of an attention kernel, are part of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import backends

from gt_trace._torch_internals import (
    DEVICE_QUESTION,
    FakeTensorMode,
    OpOverload,
    is_any_autocast_enabled,
    pytree,
)
from gt_trace.capture.fake_tensors import forget_written_literals
from gt_trace.capture.purity import collective_refusal
from gt_trace.capture.stack_traces import line_of_user
from gt_trace.capture.thread_settings import (
    ATTENTION_KERNELS,
    KERNEL_SETTINGS,
    SETTINGS,
    setting_text,
)
from gt_trace.errors import CaptureError

_Reader = Callable[[], Any]
_AUTOCAST = ("cpu", "cuda", "xpu", "mps")
_SMALLEST = 2.2250738585072014e-308
"""Half of it is a denormal number."""


def _autocast() -> tuple[tuple[str, bool, torch.dtype], ...]:
    if not (is_any_autocast_enabled() or torch.is_autocast_enabled("mps")):
        return ()
    return tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in _AUTOCAST
    )


def _set_autocast(values: Sequence[tuple[str, bool, torch.dtype]]) -> None:
    for device in _AUTOCAST:
        torch.set_autocast_enabled(device, False)
    for device, is_enabled, dtype in values:
        torch.set_autocast_enabled(device, is_enabled)
        torch.set_autocast_dtype(device, dtype)


def _drop_default_device(modes: Iterable[str]) -> None:
    if not any(mode.startswith("DeviceContext") for mode in modes):
        torch.set_default_device(None)


_DTYPE = "default dtype"
_MODES = "torch function modes"

_OF_KERNELS: dict[str, tuple[_Reader, Callable[[Any], object]]] = {
    _DTYPE: (torch.get_default_dtype, torch.set_default_dtype),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "flushing of denormal numbers": (lambda: _SMALLEST * 0.5 == 0.0, torch.set_flush_denormal),
    **KERNEL_SETTINGS,
}
"""How to read and write each setting that kernels read when they run."""

_READERS = [read for read, _ in _OF_KERNELS.values()]

_ALL: dict[str, tuple[_Reader, Callable[[Any], object] | None]] = {
    **{name: (read, None) for name, read in SETTINGS.items()},
    **{
        f"attention: {kind}_sdp_enabled": (
            getattr(backends.cuda, f"{kind}_sdp_enabled"),
            getattr(backends.cuda, f"enable_{kind}_sdp"),
        )
        for kind in ATTENTION_KERNELS
    },
    _MODES: (SETTINGS[_MODES], _drop_default_device),
    "fast path of nn.MultiheadAttention": (
        backends.mha.get_fastpath_enabled,
        backends.mha.set_fastpath_enabled,
    ),
    **_OF_KERNELS,
    "autograd": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast": (_autocast, _set_autocast),
}


def _values_of_kernels() -> list[Any]:
    return [read() for read in _READERS]


@contextmanager
def refuse_changed_settings(fake_mode: FakeTensorMode) -> Iterator[None]:
    """Refuse operators, run inside on tensors of ``fake_mode``, that read a changed setting.

    Collectives of eager execution are refused, too.

    Raises:
        CaptureError: names the settings, the operator and the line.
    """
    before, dispatch = _values_of_kernels(), fake_mode.dispatch
    refused: list[str] = []

    def checked(
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        if getattr(func, "namespace", None) == "c10d":
            refused.append(collective_refusal(str(func), line_of_user()))
            raise CaptureError(refused[0])
        if isinstance(func, OpOverload):
            forget_written_literals(func, args, kwargs or {})
        result = dispatch(func, types, args, kwargs or {})
        if func is DEVICE_QUESTION:  # a third of all calls, and no operator
            return result
        now = _values_of_kernels()
        if now != before:
            problems = [
                _changed(name, value, was)
                for name, was, value in zip(_OF_KERNELS, before, now, strict=True)
                if _differ(value, was) and _is_read(name, func, (args, kwargs), result)
            ]
            if problems:
                refused.append(_refusal(str(func), problems))
                raise CaptureError(refused[0])
        return result

    fake_mode.dispatch = checked  # type: ignore[method-assign]
    try:
        yield
    finally:
        fake_mode.dispatch = dispatch  # type: ignore[method-assign]
    if refused:
        raise CaptureError(refused[0])  # the step caught it, and went on


@contextmanager
def refuse_left_settings() -> Iterator[None]:
    """Refuse a step, run inside, that leaves a setting changed; each is set back.

    Raises:
        CaptureError: lists every such setting.
    """
    before = {name: read() for name, (read, _) in _ALL.items()}
    problems: list[str] = []
    try:
        yield
    finally:
        for name, (read, write) in _ALL.items():
            if _differ(now := read(), before[name]):
                problems.append(_changed(name, now, before[name]))
                if write is not None:
                    write(before[name])
    if problems:
        raise CaptureError(
            "the step leaves settings changed, and a replay would not change them:\n  "
            + "\n  ".join(problems)
            + "\nSet them before the capture, or set them back in the step"
        )


def _differ(one: Any, other: Any) -> bool:
    """Return whether two values differ; a float32 precision that is not set is that of IEEE."""
    return bool(one != other) and {one, other} != {"none", "ieee"}


def _changed(name: str, now: object, was: object) -> str:
    return f"{name}: {setting_text(now)}, and was {setting_text(was)}"


def _refusal(operator: str, problems: Iterable[str]) -> str:
    listed = "\n  ".join(problems)
    remedy = "Set it outside of the step, before the capture"
    if _DTYPE in listed:
        remedy += "; give each operator that makes numbers its dtype"
    return (
        f"the step changes a setting that {operator} reads whenever it runs, and a replay does not "
        f"change it:\n  {listed}\n{line_of_user()}\n{remedy}"
    )


def _is_read(name: str, func: Any, operands: Any, result: Any) -> bool:
    """Return whether a kernel may compute otherwise under another value of a setting."""
    if not isinstance(func, OpOverload):
        return True
    if func.is_view:
        return False
    return name != _DTYPE or _reads_default_dtype(operands, result)


def _reads_default_dtype(operands: Any, result: Any) -> bool:
    """Return whether PyTorch's rules of promotion lead to the default dtype.

    They do if an operator makes floating-point numbers, or compares with one, and neither a tensor
    nor an argument says of which dtype.
    """
    leaves = pytree.tree_leaves(operands)
    if any(isinstance(each, torch.dtype) or _is_inexact(each) for each in leaves):
        return False
    numbers = any(isinstance(each, float | complex | torch.SymFloat) for each in leaves)
    return numbers or any(map(_is_inexact, pytree.tree_leaves(result)))


def _is_inexact(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
