"""Pieces of programs in pages are those that the programs have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from check_workspace import violations
from page_programs import MissingPieceError, with_pieces, without_marks
from workspace import Workspace

Load = Callable[[], Workspace]

PROGRAM = """\
def train():
    # [start: step]
    def step(x):
        return x

    # [end: step]
    return step
"""
PAGE = """\
# A page

<!-- examples/loop.py: step -->
```python
{shown}```

```python
other = "code"
```
"""
STEP = "def step(x):\n    return x\n"


@pytest.fixture
def repository(root: Path) -> Path:
    (root / "examples").mkdir()
    (root / "examples" / "loop.py").write_text(PROGRAM)
    (root / "docs" / "tutorials").mkdir(parents=True)
    return root


@pytest.mark.parametrize("before", ["", "as it was\n", STEP])
def test_a_block_gets_what_the_program_has_between_its_marks(before: str, repository: Path) -> None:
    assert with_pieces(PAGE.format(shown=before), repository) == PAGE.format(shown=STEP)


def test_a_piece_or_a_program_that_is_not_there_is_named(repository: Path) -> None:
    with pytest.raises(MissingPieceError) as error:
        with_pieces(PAGE.replace(": step", ": stop").format(shown=""), repository)
    assert str(error.value) == "examples/loop.py: no [start: stop] and [end: stop]"
    with pytest.raises(MissingPieceError, match=r"examples/lop\.py: .*No such file"):
        with_pieces(PAGE.replace("loop", "lop").format(shown=""), repository)


def test_a_reader_of_a_program_sees_no_marks() -> None:
    assert without_marks(PROGRAM) == (
        "def train():\n    def step(x):\n        return x\n\n    return step\n"
    )


def test_reports_a_page_whose_program_has_changed(repository: Path, load: Load) -> None:
    page = repository / "docs" / "tutorials" / "loop.md"
    page.write_text(PAGE.format(shown=STEP))
    assert list(violations(load())) == []
    page.write_text(PAGE.format(shown="def step(y):\n    return y\n"))
    assert list(violations(load())) == [
        "pages_show_their_programs: docs/tutorials/loop.md shows a program as it was: `make format`"
    ]
    page.write_text(PAGE.replace(": step", ": stop").format(shown=""))
    (found,) = violations(load())
    assert found == (
        "pages_show_their_programs: docs/tutorials/loop.md shows a piece of examples/loop.py: no "
        "[start: stop] and [end: stop]"
    )
