"""The README's examples run and print what it says."""

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_print_what_the_readme_shows():
    text = README.read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    shown = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    assert len(programs) == len(shown) == 2
    for program, expected in zip(programs, shown, strict=True):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(program, str(README), "exec"), {})
        assert printed.getvalue() == expected


def test_the_map_names_every_module():
    text = README.read_text(encoding="utf-8")
    source = README.parent / "src" / "gt_config"
    if not source.is_dir():  # an installed wheel, tested without its sources beside it
        import gt_config

        source = Path(gt_config.__path__[0])
    modules = {path.name for path in source.glob("*.py") if path.name != "__init__.py"}
    assert {name for name in modules if f"`{name}`" not in text} == set()
