"""The README's examples run and print what it says; its map is complete."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import gt_pipeline

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_print_what_the_readme_shows():
    text = README.read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    shown = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    assert len(programs) == len(shown) == 2
    for program, expected in zip(programs, shown, strict=True):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(program, str(README), "exec", dont_inherit=True), {"__name__": "readme"})
        assert without_trailing_spaces(printed.getvalue()) == without_trailing_spaces(expected)


def without_trailing_spaces(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def test_the_map_names_every_module_and_no_other():
    text = README.read_text(encoding="utf-8").partition("## Map")[2]
    source = Path(gt_pipeline.__path__[0])
    modules = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if path.name != "__init__.py"
    }
    assert set(re.findall(r"^\| `(\S+\.py)` \|", text, flags=re.MULTILINE)) == modules
