"""The public surface of the package, and what importing it loads."""

from __future__ import annotations

import importlib.metadata
import pickle
import re
import subprocess
import sys

import pytest

import gt_pipeline
from gt_pipeline import errors, schedules

_SIBLINGS = ("gt_config", "gt_trace", "gt_passes", "gt_autoparallel", "gt_trainer", "torchtitan")

_LOADED = """
import importlib, sys
importlib.import_module(sys.argv[1])
found = sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[2:]))
print(" ".join(found))
"""


@pytest.mark.parametrize("module", ["gt_pipeline.split", "gt_pipeline.schedules", "gt_pipeline"])
def test_importing_it_loads_no_other_package_of_ours_and_no_torchtitan(module: str):
    command = [sys.executable, "-c", _LOADED, module, *_SIBLINGS]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert loaded.split() == []


def test_the_check_above_would_see_a_loaded_package():
    command = [sys.executable, "-c", _LOADED, "gt_pipeline", "gt_pipeline"]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert loaded.split() == ["gt_pipeline"]


def test_what_the_parts_export_the_package_exports():
    parts = {*errors.__all__, *schedules.__all__}
    assert set(gt_pipeline.__all__) == parts | {"__version__"}
    assert all(hasattr(gt_pipeline, name) for name in gt_pipeline.__all__)


def test_every_error_stands_in_the_tree():
    tree = errors.__doc__ or ""
    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, errors.GtPipelineError)
        assert name in tree
        for base in (ValueError, TypeError, RuntimeError):
            if issubclass(error, base):
                assert re.search(rf"{name} +\({base.__name__}\)", tree)


def test_an_error_that_crosses_processes_keeps_its_text():
    error = errors.StageLayoutError(what="3 stages over 2 ranks", problems=["one", "two"])
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.StageLayoutError
    assert str(copy) == str(error) == "3 stages over 2 ranks:\n  - one\n  - two"


def test_the_installed_metadata_ask_for_torch_alone_without_the_extra():
    requirements = importlib.metadata.requires("gt-pipeline") or []
    plain = [line for line in requirements if "extra ==" not in line]
    behind_the_extra = [re.split("[<>=]", line)[0] for line in requirements if "extra ==" in line]
    assert [re.split("[<>=]", line)[0] for line in plain] == ["torch"]
    assert behind_the_extra == ["gt-config", "gt-trace", "gt-passes"]
    assert importlib.metadata.version("gt-pipeline") == gt_pipeline.__version__
