"""Tests of graph stages run where the packages of the extra are, and are left out elsewhere."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_EXTRA = ("gt_trace", "gt_passes")

_COLLECT = """
import importlib.machinery, importlib.util, sys
import pytest
present, names = sys.argv[1] == "present", sys.argv[2:]
for name in names:
    # What find_spec looks at first.
    sys.modules[name] = None
if present:
    importlib.util.find_spec = lambda name: importlib.machinery.ModuleSpec(name, None)
sys.exit(pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", "--rootdir", ".", "."]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of tests with this package's conftest.py and one test in each part."""
    shutil.copy(Path(__file__).parent / "conftest.py", tmp_path)
    for part in ("split", "schedules", "graph", "runner"):
        (tmp_path / part).mkdir()
        (tmp_path / part / f"test_{part}.py").write_text("def test_it(): ...\n")
    return tmp_path


def collect(folder: Path, siblings: str) -> str:
    command = [sys.executable, "-c", _COLLECT, siblings, *_EXTRA]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def test_without_the_extra_split_and_schedules_are_collected_and_the_report_says_what_is_not(
    folder: Path,
):
    report = collect(folder, "absent")
    assert "split/test_split.py::test_it" in report
    assert "schedules/test_schedules.py::test_it" in report
    assert "graph/test_graph.py" not in report
    assert "runner/test_runner.py" not in report
    assert "2 tests collected" in report
    assert (
        "gt-pipeline: tests/estimates and tests/graph and tests/runner left out, since gt_trace, "
        "gt_passes of gt-pipeline[graph] cannot be imported"
    ) in report


def test_with_the_extra_nothing_is_left_out(folder: Path):
    report = collect(folder, "present")
    assert "4 tests collected" in report
    assert "left out" not in report


def test_here_a_part_is_collected_exactly_when_its_packages_can_be_imported(
    request: pytest.FixtureRequest,
):
    conftest = next(
        plugin
        for plugin in request.config.pluginmanager.get_plugins()
        if getattr(plugin, "__file__", None) == str(Path(__file__).parent / "conftest.py")
    )
    installed = all(importlib.util.find_spec(name) for name in _EXTRA)
    assert bool(conftest.collect_ignore) is not installed
