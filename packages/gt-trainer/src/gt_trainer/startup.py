"""Where the time goes between the start of the process and the first optimizer step.

Marks are wall-clock times since the process (or, for forked ranks, the launcher) started, so that
the time of imports counts. ``startup.json`` in the dump folder holds them for rank 0.
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
        self._finished = False

    @contextmanager
    def part(self, name: StartupPart) -> Iterator[None]:
        """Count the time inside as that part, if the first update has not happened yet."""
        begin = time.time()
        try:
            yield
        finally:
            if not self._finished:
                spent = time.time() - begin
                self._seconds[name] = self._seconds.get(name, 0.0) + spent

    def seconds(self, name: StartupPart) -> float:
        """Seconds counted so far for that part."""
        return self._seconds.get(name, 0.0)

    def finish(self, path: Path | None) -> dict[str, float] | None:
        """The first update has happened: write the parts to ``path``, once.

        Returns:
            Seconds by part, with their sum as "total"; None on every later call.
        """
        if self._finished:
            return None
        self._finished = True
        total = time.time() - self._start
        parts: dict[str, float] = dict(self._seconds.items())
        parts["execution"] = total - sum(parts.values())
        parts["total"] = total
        if path is not None:
            path.write_text(json.dumps(parts) + "\n")
        return parts


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
