"""The examples in the README run and print what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

_README = Path(__file__).parent.parent / "README.md"


@pytest.mark.skipif(not _README.exists(), reason="the tests run apart from the package's folder")
def test_examples_print_what_the_readme_says() -> None:
    examples = re.findall(
        r"```python\n(.*?)```\n\nprints\n\n```text\n(.*?)```", _README.read_text(), re.DOTALL
    )
    assert len(examples) == 5
    for code, printed in examples:
        if "gt_passes" in code and not find_spec("gt_passes"):
            continue  # the wheel is tested without it
        out = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert out.stdout == printed
