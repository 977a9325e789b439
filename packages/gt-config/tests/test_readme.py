"""The README's example runs and prints what it says."""

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_prints_what_the_readme_shows():
    text = README.read_text(encoding="utf-8")
    [program] = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    [shown] = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, str(README), "exec"), {})
    assert printed.getvalue() == shown


def test_the_map_names_every_module():
    text = README.read_text(encoding="utf-8")
    source = README.parent / "src" / "gt_config"
    if not source.is_dir():  # an installed wheel, tested without its sources beside it
        import gt_config

        source = Path(gt_config.__path__[0])
    modules = {path.name for path in source.glob("*.py") if path.name != "__init__.py"}
    assert {name for name in modules if f"`{name}`" not in text} == set()
