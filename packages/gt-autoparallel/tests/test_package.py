"""Every exported name can be imported, explains itself, and is in the README; metadata agrees."""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import gt_autoparallel

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
NAMES = sorted(set(gt_autoparallel.__all__) - {"__version__"})


@pytest.mark.parametrize("name", NAMES)
def test_what_is_exported_explains_itself_and_is_in_the_readme(name: str) -> None:
    exported = getattr(gt_autoparallel, name)
    assert exported.__module__.startswith("gt_autoparallel.")
    assert inspect.getdoc(exported), "it has no docstring"
    assert re.search(rf"\b{name}\b", README), "the README does not mention it"


def test_what_folders_export_is_there() -> None:
    for info in pkgutil.iter_modules(gt_autoparallel.__path__, "gt_autoparallel."):
        module = importlib.import_module(info.name)
        for name in getattr(module, "__all__", []):
            assert hasattr(module, name), f"{info.name} has no {name}"


def test_installed_metadata_agrees() -> None:
    metadata = importlib.metadata.metadata("gt-autoparallel")
    assert metadata["Version"] == gt_autoparallel.__version__
