"""Where the time goes between the start of the process and the first optimizer step.

Seconds are of the clock, since the process (or, for forked ranks, the launcher) started, so that
the time of imports counts. Beside them stand processor seconds of this process alone: where several
ranks share a core, only those say what a part costs. What a launcher imported before it forked is
in none of its ranks' processor seconds. ``startup.json`` in the dump folder holds both for rank 0.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

StartupPart = Literal["imports", "setup", "capture", "passes", "load", "execution"]

PROCESS_START_VARIABLE = "GT_PROCESS_START"
"""Environment variable with the launcher's start, in seconds since the epoch."""


class StartupClock:
    """Adds up seconds by part until the first update; what no part claims is "execution"."""

    def __init__(self) -> None:
        self._start = float(os.environ.get(PROCESS_START_VARIABLE) or _process_start())
        self._seconds: dict[StartupPart, float] = {"imports": time.time() - self._start}
        self._cpu_seconds: dict[StartupPart, float] = {"imports": time.process_time()}
        self._finished = False

    @contextmanager
    def part(self, name: StartupPart) -> Iterator[None]:
        """Count the time inside as that part, if the first update has not happened yet."""
        begin, cpu_begin = time.time(), time.process_time()
        try:
            yield
        finally:
            if not self._finished:
                _add(self._seconds, name, time.time() - begin)
                _add(self._cpu_seconds, name, time.process_time() - cpu_begin)

    def seconds(self, name: StartupPart) -> float:
        """Seconds counted so far for that part."""
        return self._seconds.get(name, 0.0)

    def cpu_seconds(self, name: StartupPart) -> float:
        """Processor seconds counted so far for that part, of all threads of this process."""
        return self._cpu_seconds.get(name, 0.0)

    def finish(self, path: Path | None) -> dict[str, float] | None:
        """The first update has happened: write the parts to ``path``, once.

        Returns:
            Seconds by part, with their sum as "total", and processor seconds likewise, as
            "cpu_imports" to "cpu_total"; None on every later call.
        """
        if self._finished:
            return None
        self._finished = True
        parts = _with_rest(self._seconds, total=time.time() - self._start)
        cpu_parts = _with_rest(self._cpu_seconds, total=time.process_time())
        parts |= {f"cpu_{name}": seconds for name, seconds in cpu_parts.items()}
        if path is not None:
            path.write_text(json.dumps(parts) + "\n")
        return parts


def _add(seconds: dict[StartupPart, float], name: StartupPart, spent: float) -> None:
    seconds[name] = seconds.get(name, 0.0) + spent


def _with_rest(seconds: dict[StartupPart, float], *, total: float) -> dict[str, float]:
    parts: dict[str, float] = dict(seconds.items())
    return {**parts, "execution": total - sum(parts.values()), "total": total}


def _process_start() -> float:
    """Start of this process in seconds since the epoch; now, where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        boot = next(
            float(line.split()[1])
            for line in Path("/proc/stat").read_text().splitlines()
            if line.startswith("btime")
        )
    except (OSError, StopIteration):
        return time.time()
    return boot + int(fields[19]) / os.sysconf("SC_CLK_TCK")
