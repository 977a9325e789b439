"""The README's map is complete, and its program runs."""

import re
import subprocess
import sys
from pathlib import Path

import gt_trainer

README = Path(__file__).parents[1] / "README.md"


def test_the_program_in_it_runs():
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), flags=re.DOTALL)
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stderr
    assert "simulated" in finished.stdout


def test_the_map_names_every_shelf():
    text = README.read_text(encoding="utf-8").partition("## Map")[2]
    source = Path(gt_trainer.__path__[0])
    shelves = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in source.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    unnamed = {"__init__.py", "__main__.py"}
    assert {name for name in shelves - unnamed if f"`{name}`" not in text} == set()
