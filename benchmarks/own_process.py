"""What a module of the benchmarks prints when it runs in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["record_of"]


def record_of(module: str, *arguments: str) -> dict[str, Any]:
    """Run ``python -m module arguments`` on one thread, and read the JSON of its last line.

    Raises:
        RuntimeError: it failed; the text has the end of what it said.
    """
    command = [sys.executable, "-m", module, *arguments]
    print(" ".join(command[2:]), file=sys.stderr, flush=True)
    ran = subprocess.run(
        command,
        cwd=Path(__file__).parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode != 0:
        raise RuntimeError(f"{' '.join(command[2:])} failed:\n{ran.stderr[-4000:]}")
    record: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return record
