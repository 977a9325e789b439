"""The README's examples run and print what it says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

import gt_passes
from gt_passes import registry

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.parametrize("number", [0, 1], ids=["a pass", "EP overlap"])
def test_an_example_prints_what_the_readme_shows(number: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "_PASSES", dict(registry._PASSES))
    text = README.read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    outputs = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    assert len(programs) == len(outputs) == 2
    program, shown = programs[number], outputs[number]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, str(README), "exec", dont_inherit=True), {"__name__": "readme"})
    assert without_times(printed.getvalue()) == without_times(shown)


def without_times(text: str) -> str:
    return re.sub(r" +\d+\.\d", " #", text)


def test_the_map_names_every_shelf():
    text = README.read_text(encoding="utf-8")
    source = Path(gt_passes.__path__[0])
    shelves = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in source.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert {name for name in shelves - {"__init__.py"} if f"`{name}`" not in text} == set()
