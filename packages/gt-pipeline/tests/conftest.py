"""Leaves out the tests that need the extra [graph] where its packages are not installed.

Splitting and schedules are tested with torch and gt-config alone. What is left out is said at the end of the
report; test_left_out.py and tools/smoke.py see to it that nothing is where the packages are there.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

_EXTRA = ("gt_trace", "gt_passes")
_NEED_THE_EXTRA = ["estimates", "graph", "runner"]

_missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
collect_ignore = _NEED_THE_EXTRA if _missing else []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what is left out, and why."""
    if _missing:
        terminalreporter.write_line(
            f"gt-pipeline: tests/{' and tests/'.join(_NEED_THE_EXTRA)} left out, since "
            f"{', '.join(_missing)} of gt-pipeline[graph] cannot be imported"
        )
