"""A cluster: the hardware of one kind of machine, and what only a plan asks of many of them.

A cluster file is TOML beside the hardware files that simulations read (JSON, as
``benchmarks/calibrate_simulation.py`` writes them). It names one of those, may set single constants
otherwise, and adds figures about the whole: price, power, failures, checkpoints. Each has its
source. Which figures there are is told by ``Cluster``; nothing else is accepted.

::

    name = "..."
    hardware = "h100_sxm.json"                      # of gt_passes, or beside this file
    [figures.failures_per_gpu_day]
    value = 0.0005
    source = "..."
    [constants.nic_effective_bytes_per_s]           # of the hardware file
    value = 23e9
    source = "..."
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from gt_passes.simulation import Hardware, shipped_hardware
from gt_passes.simulation.hardware import HardwareDataError, load_hardware

_GB = 1e9
_ENTRY = ("value", "source")


class ClusterFileError(ValueError):
    """A cluster file is malformed; the text lists everything that is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Machines of one kind, as many as one asks for."""

    hardware: Hardware
    """By the cluster's own name."""

    oversubscription: float
    """By how much what leaves a node is slower than its NICs, when all talk at once."""

    gpus_per_host: int
    """Of one operating system, which starts their ranks; an NVLink domain may have several, and has
    one where the file does not say."""

    power_watts_per_gpu: float
    """The limit, of the GPU alone."""

    price_per_gpu_hour: float
    """In dollars."""

    failures_per_gpu_day: float
    """Interruptions of a whole run for which one GPU's machine is the reason."""

    checkpoint_seconds: float
    """For which a checkpoint stops training."""

    restart_seconds: float
    """From a failure to the next step."""

    sources: Mapping[str, str]
    """Of each figure."""

    def with_relaxed(self, what: Mapping[str, float]) -> Cluster:
        """The same with other machines.

        Args:
            what: by ``RELAXABLE``'s names: ``nic`` in Gb/s, ``memory`` in GB.
        """
        hardware = self.hardware
        if "nic" in what:
            factor = what["nic"] / 8 * _GB / hardware.nic_bytes_per_s
            hardware = replace(
                hardware,
                nic_bytes_per_s=hardware.nic_bytes_per_s * factor,
                nic_effective_bytes_per_s=hardware.nic_effective_bytes_per_s * factor,
            )
        if "memory" in what:
            capacity = int(what["memory"] * _GB)
            hardware = replace(hardware, hbm_capacity_bytes=capacity)
        named = ", ".join(f"{name} {value:g}" for name, value in what.items())
        return replace(
            self,
            hardware=replace(hardware, name=f"{hardware.name} ({named})"),
        )


RELAXABLE = {"nic": "Gb/s of each GPU's NIC", "memory": "GB of each GPU"}
"""What ``--what-if`` sets, and its unit."""

_FIGURES = tuple(
    field.name for field in fields(Cluster) if field.name not in ("hardware", "sources")
)


def shipped_clusters() -> list[str]:
    """Names of the cluster files that are shipped."""
    folder = resources.files(__package__) / "clusters"
    return sorted(each.name.removesuffix(".toml") for each in folder.iterdir())


def load_cluster(name: str) -> Cluster:
    """A shipped cluster by its name, or one of a file.

    Raises:
        ClusterFileError: there is no such cluster, or its file is wrong.
    """
    if name in shipped_clusters():
        text = (resources.files(__package__) / "clusters" / f"{name}.toml").read_text("utf-8")
        return parse_cluster(text, where=name, folder=None)
    path = Path(name)
    if not path.is_file():
        raise ClusterFileError(
            f"no cluster {name!r}.{_nearest(name, shipped_clusters())} There are "
            f"{', '.join(shipped_clusters())}; or a file of yours"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ClusterFileError(f"{name} is not UTF-8: {error}") from None
    return parse_cluster(text, where=name, folder=path.parent)


def parse_cluster(text: str, *, where: str, folder: Path | None) -> Cluster:
    """Read a cluster file.

    Args:
        text: of the file.
        where: what messages call it.
        folder: where a hardware file of its own lies; None if it can have none.

    Raises:
        ClusterFileError: lists what is wrong.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClusterFileError(f"{where} is no TOML: {error}") from None
    problems = list(_unknown(document, ("name", "hardware", "figures", "constants"), "key"))
    problems += [f"{name} is missing" for name in ("name", "hardware") if name not in document]
    no_tables = [
        f"{name} is {document[name]!r}, and must be a table"
        for name in ("figures", "constants")
        if not isinstance(document.get(name, {}), dict)
    ]
    if no_tables:
        listed = "\n  ".join(no_tables)
        raise ClusterFileError(f"cluster file {where}:\n  {listed}")
    figures, constants = document.get("figures", {}), document.get("constants", {})
    problems += _unknown(figures, _FIGURES, "figure")
    needed = (name for name in _FIGURES if name != "gpus_per_host")
    problems += [f"figures.{name} is missing" for name in needed if name not in figures]
    problems += _malformed("figures", figures)
    problems += _malformed("constants", constants)
    hardware = None
    try:
        if "hardware" in document:
            hardware = _hardware(str(document["hardware"]), folder)
    except (HardwareDataError, OSError) as error:
        problems.append(f"hardware is {document['hardware']!r}: {error}")
    if hardware is not None:
        problems += _unknown(constants, tuple(hardware.constants), "constant")
        problems += _fractions(hardware, constants)
    if problems or hardware is None:
        listed = "\n  ".join(problems)
        raise ClusterFileError(f"cluster file {where}:\n  {listed}")
    values = {name: float(entry["value"]) for name, entry in figures.items()}
    gpus_per_host = int(values.pop("gpus_per_host", hardware.gpus_per_node))
    return Cluster(
        gpus_per_host=gpus_per_host,
        hardware=replace(
            _changed(hardware, constants, oversubscription=values["oversubscription"]),
            name=str(document["name"]),
        ),
        sources={name: entry["source"] for name, entry in {**figures, **constants}.items()},
        **values,
    )


def _hardware(name: str, folder: Path | None) -> Hardware:
    if folder is not None and (folder / name).is_file():
        return load_hardware((folder / name).read_text(encoding="utf-8"))
    return shipped_hardware(name)


def _changed(
    hardware: Hardware, constants: Mapping[str, Mapping[str, Any]], *, oversubscription: float
) -> Hardware:
    values = {
        name: type(getattr(hardware, name))(entry["value"]) for name, entry in constants.items()
    }
    changed = replace(hardware, **values)
    return replace(
        changed, nic_effective_bytes_per_s=changed.nic_effective_bytes_per_s / oversubscription
    )


def _unknown(found: Mapping[str, object], known: Collection[str], what: str) -> Iterator[str]:
    for name in found:
        if name not in known:
            yield f"no {what} {name!r}.{_nearest(name, known)}"


def _malformed(table: str, entries: Mapping[str, Any]) -> Iterator[str]:
    for name, entry in entries.items():
        where = f"{table}.{name}"
        if not isinstance(entry, dict):
            yield f"{where} is {entry!r}, and must have value and source"
            continue
        yield from (f"{where}: {each}" for each in _unknown(entry, _ENTRY, "key"))
        value: Any = entry.get("value")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            yield f"{where}.value is {value!r}, and must be a number above 0"
        elif name == "oversubscription" and value < 1:
            yield f"{where}.value is {value!r}, and must be 1 or more"
        elif name == "gpus_per_host" and value != int(value):
            yield f"{where}.value is {value!r}, and must be a whole number"
        if not entry.get("source"):
            yield f"{where} has no source"


def _fractions(hardware: Hardware, constants: Mapping[str, Any]) -> Iterator[str]:
    for name, entry in constants.items():
        value = entry.get("value") if isinstance(entry, dict) else None
        is_whole = not isinstance(value, float) or value.is_integer()
        if isinstance(getattr(hardware, name, None), int) and not is_whole:
            yield f"constants.{name}.value is {value!r}, and must be a whole number"


def _nearest(word: str, known: Collection[str]) -> str:
    nearest = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
