"""The README's example runs and prints what it says; its map and its links lead somewhere."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from pathlib import Path

import pytest

import gt_autoparallel

README = Path(__file__).parents[1] / "README.md"


def text() -> str:
    return README.read_text(encoding="utf-8")


def test_the_example_prints_what_the_readme_shows():
    (program,) = re.findall(r"```python\n(.*?)```", text(), flags=re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", text(), flags=re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, str(README), "exec", dont_inherit=True), {"__name__": "readme"})
    assert printed.getvalue() == shown


def test_the_map_names_every_module_and_nothing_else():
    source = Path(gt_autoparallel.__path__[0])
    there = {path.name for path in source.glob("*.py") if not path.name.startswith("_")}
    there |= {f"{path.parent.name}/" for path in source.glob("*/__init__.py")}
    map_of_readme = text().partition("## Map")[2]
    assert set(re.findall(r"`([a-z_]+(?:\.py|/))`", map_of_readme)) == there


FOLDERS = sorted(path.parent for path in Path(gt_autoparallel.__path__[0]).glob("*/__init__.py"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_docstring_of_a_folder_names_its_files(folder: Path):
    documented = importlib.import_module(f"gt_autoparallel.{folder.name}").__doc__ or ""
    names = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", documented)) == []


def test_names_in_the_text_are_exported():
    for name in set(re.findall(r"`([a-z_]+)\(", text())) - {"print"}:
        assert name in gt_autoparallel.__all__, name


def test_links_to_other_files_lead_somewhere():
    if not (README.parent / "src").exists():
        pytest.skip("a wheel's tests run without the repository around them")
    for target in re.findall(r"\]\(https://[^)#]*/blob/main/([^)#]+)", text()):
        assert (README.parents[2] / target).exists(), target
