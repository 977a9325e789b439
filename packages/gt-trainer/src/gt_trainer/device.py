"""Make the CPU a device that torchtitan can train on.

torchtitan 0.3.0 reads two values, ``device_type`` and ``device_module``, from
``torchtitan.tools.utils``, and its modules copy them when they are imported
(``components/metrics.py``, ``distributed/utils.py``, ``distributed/parallel_dims.py``,
``models/common/token_dispatcher.py``, ``tools/profiler.py``). Without an accelerator it assumes
CUDA, and ``torch.cpu`` lacks half of what it asks a device module for. ``install`` supplies both
values in that one place, before anything has copied them; no torchtitan class or function that
computes something is touched, and with an accelerator nothing is touched at all.

Two consequences of torchtitan's own code are worth knowing:

- ``get_local_device`` numbers devices by LOCAL_RANK unless exactly one is visible. ``CpuDevice``
  says that one is, so every rank computes on ``cpu:0``, which torch treats as ``cpu``.
- The process group's backend follows from the device type, so collectives run on gloo, with one
  thread for each group (``gt_trace.gloo`` says why).
"""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal, NoReturn

import torch

from gt_trace.gloo import use_one_gloo_thread

DeviceChoice = Literal["auto", "cpu", "cuda"]

_CHOICES: tuple[DeviceChoice, ...] = ("auto", "cpu", "cuda")
_ENVIRONMENT_VARIABLE = "GT_DEVICE"
_SUPPLIED = ("device_type", "device_module")
_CONTAINER_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)
"""Files of control groups, versions 2 and 1, as a container sees its own."""
_INTENDED: ContextVar[str | None] = ContextVar("intended device", default=None)
_TITAN = "torchtitan"
_TITAN_VALUES = "torchtitan.tools.utils"


class DeviceUnavailableError(ValueError):
    """The device that was asked for is unknown, or this machine does not have it."""


class DeviceInstallError(RuntimeError):
    """``install`` came too late: torchtitan modules already hold other device values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuProperties:
    """What ``torch.cuda.get_device_properties`` tells of a GPU, as far as torchtitan reads it."""

    name: str
    """Model of the processor, for people."""

    total_memory: int
    """Physical memory of the machine in bytes. Every rank on the machine shares it."""


class CpuDevice:
    """The functions of ``torch.cuda`` that torchtitan calls, answered for the CPU.

    There is one device, with index 0, and work on it is synchronous. *Memory* is that of this
    process as the operating system counts it: resident set size, and its peak since the last
    ``reset_peak_memory_stats``. That includes the interpreter and every loaded library, unlike a
    GPU allocator's count.
    """

    def is_available(self) -> bool:
        """Return True."""
        return True

    def device_count(self) -> int:
        """Return 1: all ranks of a machine share one CPU device."""
        return 1

    def current_device(self) -> int:
        """Return 0, an index as ``torch.cuda`` does (``torch.cpu`` returns a string)."""
        return 0

    def set_device(self, device: object) -> None:
        """Do nothing: there is only one device to be on."""

    def synchronize(self, device: object = None) -> None:
        """Do nothing: CPU work has finished when it returns."""

    def empty_cache(self) -> None:
        """Do nothing: freed memory is the C allocator's to keep."""

    def get_device_name(self, device: object = None) -> str:
        """Return the processor's model, or its architecture where the system does not say."""
        return _processor_name()

    def get_device_properties(self, device: object = None) -> CpuProperties:
        """Return name and physical memory (bytes) of this machine."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return CpuProperties(name=_processor_name(), total_memory=total)

    def memory_stats(self, device: object = None) -> dict[str, int]:
        """Return this process's resident memory under the names of the CUDA allocator, in bytes.

        Active and reserved bytes are the same number. Allocation retries and out-of-memory events
        are always 0: the system ends a process that it cannot give memory.
        """
        current, peak = _resident_bytes()
        return {
            "active_bytes.all.current": current,
            "active_bytes.all.peak": peak,
            "reserved_bytes.all.current": current,
            "reserved_bytes.all.peak": peak,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def reset_peak_memory_stats(self, device: object = None) -> None:
        """Start a new peak from here, where the system allows it.

        Linux does (``/proc/self/clear_refs``). Elsewhere, and where a sandbox forbids it, the peak
        stays that of the whole life of the process.
        """
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return

    @property
    def memory(self) -> NoReturn:
        """Refuse: torchtitan's memory snapshots record the CUDA allocator."""
        raise DeviceUnavailableError(
            "memory snapshots record the CUDA allocator and do not exist on cpu: leave out "
            "--profiler.enable_memory_snapshot"
        )


_CPU_DEVICE = CpuDevice()


def select_device_type(
    choice: str | None = None, *, environment: Mapping[str, str] = os.environ
) -> str:
    """Say which device type this process trains on. Loads nothing of torchtitan.

    Args:
        choice: "cpu", "cuda", or "auto" (the accelerator if there is one, else the CPU). None
            reads the environment variable GT_DEVICE, and is "auto" without it.
        environment: Where GT_DEVICE is looked up.

    Returns:
        A torch device type, such as "cpu" or "cuda".

    Raises:
        DeviceUnavailableError: The choice is none of these, or "cuda" without a CUDA device.
    """
    wanted = environment.get(_ENVIRONMENT_VARIABLE, "auto") if choice is None else choice
    if wanted not in _CHOICES:
        source = _ENVIRONMENT_VARIABLE if choice is None else "device"
        raise DeviceUnavailableError(
            f"{source} is {wanted!r}; allowed: {', '.join(map(repr, _CHOICES))}"
        )
    if wanted == "cpu":
        return "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise DeviceUnavailableError(
            "device 'cuda' was asked for, but torch finds no CUDA device here: choose 'cpu', or "
            f"unset {_ENVIRONMENT_VARIABLE}"
        )
    if wanted == "cuda":
        return "cuda"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def install(choice: str | None = None) -> str:
    """Give torchtitan its device, before its trainer is imported.

    With an accelerator this changes nothing. For the CPU it sets the two device values of
    ``torchtitan.tools.utils`` to "cpu" and a ``CpuDevice``, and its table of peak FLOPS to one that
    claims none (model FLOPS utilization, which would otherwise be taken relative to an A100, then
    reads 0). Calling it again with the same outcome does nothing.

    Args:
        choice: As for ``select_device_type``.

    Returns:
        The device type that torchtitan will use.

    Raises:
        DeviceUnavailableError: As ``select_device_type``.
        DeviceInstallError: torchtitan modules that copied the other values are already imported.
    """
    device_type = select_device_type(choice)
    values = _titan_values()
    if device_type != "cpu":
        if values.device_type == "cpu":
            raise DeviceInstallError(
                f"torchtitan was given the device 'cpu' earlier in this process, and cannot change "
                f"to {device_type!r}: start a new process"
            )
        return device_type
    supplied = {"device_type": "cpu", "device_module": _CPU_DEVICE}
    _refuse_stale_copies(supplied)
    for name, value in supplied.items():
        setattr(values, name, value)
    values.get_peak_flops = _no_peak_flops  # type: ignore[attr-defined]  # a module's attribute
    use_one_gloo_thread()  # captured steps overlap collectives
    return device_type


def installed_device_type() -> str:
    """Return the device type that torchtitan's modules read now."""
    device_type: str = _titan_values().device_type
    return device_type


@contextmanager
def intended_for(device_type: str) -> Iterator[None]:
    """Make configurations, inside, for a device that this machine may lack: dry runs do.

    Args:
        device_type: as "cuda".
    """
    token = _INTENDED.set(device_type)
    try:
        yield
    finally:
        _INTENDED.reset(token)


def intended_device_type() -> str:
    """Return what configurations are made for: the installed device, or ``intended_for``'s."""
    return _INTENDED.get() or installed_device_type()


def available_memory_bytes() -> int:
    """Return what Linux gives programs without swapping, within a container's limit.

    Elsewhere the physical memory: what of it is free, only Linux tells plainly.
    """
    most = machine_memory_bytes()
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return most
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return min(int(fields["MemAvailable"].split()[0]) * 1024, most)


def machine_memory_bytes() -> int:
    """Return the physical memory, within a container's limit."""
    physical: int = _CPU_DEVICE.get_device_properties().total_memory
    return min([physical, *filter(None, map(_limit_bytes, _CONTAINER_LIMITS))])


def _limit_bytes(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None  # "max": none


def _titan_values() -> ModuleType:
    """Import the light module that holds the values, and nothing that copies them."""
    import torchtitan.tools.utils

    return torchtitan.tools.utils


def _refuse_stale_copies(supplied: Mapping[str, object]) -> None:
    stale = sorted(
        f"{module_name}.{name}"
        for module_name, module in list(sys.modules.items())
        if module_name.startswith(f"{_TITAN}.") and module_name != _TITAN_VALUES
        for name in _SUPPLIED
        if vars(module).get(name, supplied[name]) is not supplied[name]
    )
    if stale:
        raise DeviceInstallError(
            "the CPU device must be installed before torchtitan's trainer is imported; these "
            f"already hold other values: {', '.join(stale)}. Call gt_trainer.device.install() first"
        )


def _no_peak_flops(device_name: str) -> float:
    return math.inf


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return os.uname().machine


def _resident_bytes() -> tuple[int, int]:
    """Return (resident set size, its peak) of this process in bytes."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        # ru_maxrss counts bytes on macOS and KiB elsewhere. Its peak is all that is known there.
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return peak, peak
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    current, peak = (int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
    return current, peak
