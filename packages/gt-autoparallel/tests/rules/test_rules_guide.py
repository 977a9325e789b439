"""The example of RULES.md runs and prints what it says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from gt_autoparallel.rules.registry import forget_rule

GUIDE = Path(__file__).parents[2] / "RULES.md"


@pytest.mark.skipif(not GUIDE.exists(), reason="a wheel's tests run without it")
def test_the_example_prints_what_the_guide_shows() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(program, str(GUIDE), "exec", dont_inherit=True), {"__name__": "guide"})
    finally:
        forget_rule("mylib.gate")
    assert printed.getvalue() == shown
