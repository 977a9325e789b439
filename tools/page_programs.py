"""What pages show of the programs in examples/: copied into them, so that they read in any viewer.

A page names a piece by a comment before its block, ``<!-- examples/loop.py: step -->``, and the
program has it between ``# [start: step]`` and ``# [end: step]``. ``make format`` copies what is in
the programs, which tests run, into the pages, and ``make check`` compares.
"""

import re
import textwrap
from pathlib import Path

PAGES = "docs/tutorials/*.md"

_BLOCK = re.compile(
    r"^<!-- (?P<program>\S+): (?P<piece>\w+) -->\n+```python\n(?P<shown>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_MARK = re.compile(r"^ *# \[(?:start|end): \w+\]\n", re.MULTILINE)


class MissingPieceError(Exception):
    """A page names a piece that its program has not."""


def piece_of(program: str, piece: str) -> str:
    """The lines of a program between the two marks of a piece, without their indentation.

    Raises:
        MissingPieceError: the program has no such marks.
    """
    found = re.search(
        rf"^ *# \[start: {piece}\]\n(.*?)^ *# \[end: {piece}\]\n", program, re.MULTILINE | re.DOTALL
    )
    if found is None:
        raise MissingPieceError(f"no [start: {piece}] and [end: {piece}]")
    return textwrap.dedent(found[1]).strip("\n") + "\n"


def without_marks(program: str) -> str:
    """A program as a reader wants it."""
    return _MARK.sub("", program)


def with_pieces(page: str, root: Path) -> str:
    """A page with the pieces as its programs have them now.

    Raises:
        MissingPieceError: says which, and of which program.
    """

    def replaced(match: re.Match[str]) -> str:
        try:
            program = (root / match["program"]).read_text(encoding="utf-8")
            piece = piece_of(program, match["piece"])
        except (OSError, MissingPieceError) as error:
            raise MissingPieceError(f"{match['program']}: {error}") from None
        start, end = match.span("shown")
        whole, offset = match[0], match.start()
        return whole[: start - offset] + piece + whole[end - offset :]

    return _BLOCK.sub(replaced, page)


def main() -> None:
    """Write all pages anew."""
    root = Path(__file__).resolve().parents[1]
    for path in sorted(root.glob(PAGES)):
        path.write_text(with_pieces(path.read_text(encoding="utf-8"), root), encoding="utf-8")


if __name__ == "__main__":
    main()
