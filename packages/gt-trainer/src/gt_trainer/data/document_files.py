"""The documents in a file: a text file is one, JSON lines and Parquet files have one a row.

What they are is listed without keeping text: a row of JSON lines is where it lies in its file, one
of a Parquet file its number. pyarrow is imported where there is a Parquet file.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

JSON_LINES = ".jsonl"
PARQUET = ".parquet"
_SHOWN_FIELDS = 8
_SHOWN_CHARACTERS = 40


class TextSourceError(ValueError):
    """There is no usable text where it was looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document of a text source: a file, or a row of one.

    Args:
        path: Path of the file relative to the source's root, with forward slashes on every system.
        num_bytes: Size of the file or the line; of a row of a Parquet file, on average.
        row: Byte at which the line begins, or number of the row; None of a file that is one
            document.
        block: Of a Parquet file, the number of the row group: what is read and unpacked at once.
    """

    path: str
    num_bytes: int
    row: int | None = None
    block: int | None = None

    @property
    def name(self) -> str:
        """What identifies the document in its source."""
        return self.path if self.row is None else f"{self.path}:{self.row}"

    @property
    def read_with(self) -> str:
        """The name of what is read at once, the same for neighbours that are."""
        return self.name if self.block is None else f"{self.path}:{self.block}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _NoText:
    """Why there is no text in a document."""

    reason: str


def documents_of(file: Path, *, relative: str, text_field: str) -> Iterator[Document]:
    """List the documents of one file.

    Args:
        file: The file.
        relative: Its path in the source.
        text_field: Field or column with the text, of files with rows.

    Raises:
        TextSourceError: A Parquet file is damaged, or has no such column of text.
        OSError: The file cannot be read.
    """
    if file.suffix == JSON_LINES:
        start = 0
        with file.open("rb") as lines:
            for line in lines:
                if line.strip():
                    yield Document(path=relative, num_bytes=len(line), row=start)
                start += len(line)
    elif file.suffix == PARQUET:
        yield from _rows_of_parquet(file, relative, text_field)
    else:
        yield Document(path=relative, num_bytes=file.stat().st_size)


def read_document(root: Path, document: Document, *, text_field: str) -> str | None:
    """Return the document's text, None if it is not valid UTF-8 or a row without text.

    Raises:
        TextSourceError: A row has no such field.
        OSError: The file cannot be read, or is gone.
    """
    found = _text_of(root / document.path, document, text_field)
    return found if isinstance(found, str) else None


def why_no_text(root: Path, document: Document, *, text_field: str) -> str:
    """Say why ``read_document`` returns None.

    Raises:
        As ``read_document``.
    """
    found = _text_of(root / document.path, document, text_field)
    assert isinstance(found, _NoText)
    return found.reason


def _text_of(file: Path, document: Document, text_field: str) -> str | _NoText:
    if document.block is not None:
        assert document.row is not None
        first, texts = _row_group(file, document.block, text_field)
        return _text_or_reason(texts[document.row - first], text_field)
    try:
        if document.row is None:
            return file.read_bytes().decode("utf-8")
        with file.open("rb") as lines:
            lines.seek(document.row)
            record = json.loads(lines.read(document.num_bytes).decode("utf-8"))
    except UnicodeDecodeError:
        return _NoText(reason="not UTF-8 text")
    except ValueError as error:
        return _NoText(reason=f"no JSON ({error})")
    if not isinstance(record, dict):
        return _NoText(reason=f"JSON, but no object with a field {text_field!r}")
    if text_field not in record:
        raise _no_field(file, text_field, record)
    return _text_or_reason(record[text_field], text_field)


def _text_or_reason(value: object, text_field: str) -> str | _NoText:
    if isinstance(value, str):
        return value
    what = "null" if value is None else f"{json.dumps(value)[:_SHOWN_CHARACTERS]}, and no text"
    return _NoText(reason=f"its {text_field!r} is {what}")


def _rows_of_parquet(file: Path, relative: str, text_field: str) -> Iterator[Document]:
    metadata = _open_parquet(file, text_field).metadata
    start = 0
    for block in range(metadata.num_row_groups):
        group = metadata.row_group(block)
        num_bytes = group.total_byte_size // max(group.num_rows, 1)
        for row in range(start, start + group.num_rows):
            yield Document(path=relative, num_bytes=num_bytes, row=row, block=block)
        start += group.num_rows


@functools.lru_cache(maxsize=2)
def _row_group(file: Path, block: int, text_field: str) -> tuple[int, list[str | None]]:
    """The number of the first row, and the texts. Neighbours are read one after the other."""
    parquet = _open_parquet(file, text_field)
    groups = range(block)
    first = sum(parquet.metadata.row_group(each).num_rows for each in groups)
    return first, parquet.read_row_group(block, columns=[text_field])[text_field].to_pylist()


def _open_parquet(file: Path, text_field: str) -> ParquetFile:
    from pyarrow import ArrowException, parquet, types

    try:
        opened = parquet.ParquetFile(file)
    except (ArrowException, ValueError) as error:
        raise TextSourceError(f"{str(file)!r} is no Parquet file: {error}") from None
    columns = {column.name: column.type for column in opened.schema_arrow}
    if text_field not in columns:
        raise _no_field(file, text_field, columns)
    kind = columns[text_field]
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise TextSourceError(f"the column {text_field!r} of {str(file)!r} is {kind}, and no text")
    return opened


def _no_field(file: Path, text_field: str, found: object) -> TextSourceError:
    assert isinstance(found, dict)
    names = [repr(str(name)) for name in found]
    more = f" and {len(names) - _SHOWN_FIELDS} more" if len(names) > _SHOWN_FIELDS else ""
    listed = ", ".join(names[:_SHOWN_FIELDS]) or "nothing"
    return TextSourceError(
        f"{str(file)!r} has no field {text_field!r}; it has {listed}{more}: name the one with the "
        "text by --dataloader.text_field"
    )
