"""The example in the README runs and prints what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

_README = Path(__file__).parent.parent / "README.md"


@pytest.mark.skipif(not _README.exists(), reason="the tests run apart from the package's folder")
def test_example_prints_what_the_readme_says() -> None:
    text = _README.read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    printed = re.search(r"prints\n\n```text\n(.*?)```", text, re.DOTALL)
    assert code is not None
    assert printed is not None
    out = subprocess.run(
        [sys.executable, "-c", code.group(1)], capture_output=True, text=True, check=True
    )
    assert out.stdout == printed.group(1)
