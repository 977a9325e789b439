"""Documents of text, JSON lines and Parquet files: what is listed, read and refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from gt_trainer.data.document_files import TextSourceError
from gt_trainer.data.packed_text import DataResumeError, PackedText
from gt_trainer.data.text_source import TextSource, text_directory

TEXTS = ["first", "schön", "drei\nZeilen\nlang"]


def write_json_lines(path: Path, *records: object, end: str = "\n") -> None:
    path.write_text(end.join(json.dumps(each, ensure_ascii=False) for each in records) + end)


def write_parquet(path: Path, columns: dict[str, list[object]], *, rows_of_group: int = 2) -> None:
    parquet.write_table(pyarrow.table(columns), path, row_group_size=rows_of_group)


def texts_of(source: TextSource) -> list[str | None]:
    return [source.read(document) for document in source.documents]


class Bytes:
    """A tokenizer of bytes, with a beginning and an end."""

    def encode(self, text: str, *, add_bos: bool, add_eos: bool) -> list[int]:
        return [256] * add_bos + list(text.encode()) + [257] * add_eos


def test_each_line_of_json_is_a_document(tmp_path: Path):
    write_json_lines(tmp_path / "a.jsonl", *({"text": text, "n": 1} for text in TEXTS))
    source = text_directory(tmp_path)
    assert texts_of(source) == TEXTS
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    starts = [0, len(lines[0]), len(lines[0]) + len(lines[1])]
    assert [each.name for each in source.documents] == [f"a.jsonl:{start}" for start in starts]


def test_empty_lines_and_a_last_line_without_an_end_are_fine(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('\n{"text": "one"}\r\n\n{"text": "two"}')
    assert texts_of(text_directory(tmp_path)) == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'"words"', "JSON, but no object with a field 'text'"),
        (b'{"text": 3}', "its 'text' is 3, and no text"),
        (b'{"text": null}', "its 'text' is null"),
        (
            b"{text",
            "no JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))",
        ),
        (b'{"text": "\xff"}', "not UTF-8 text"),
    ],
)
def test_a_line_without_text_is_skipped_and_the_warning_says_why(
    line: bytes, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "a.jsonl").write_bytes(line + b'\n{"text": "one, two"}\n')
    source = text_directory(tmp_path)
    assert texts_of(source) == [None, "one, two"]
    with caplog.at_level("WARNING"):
        list(PackedText(source, tokenizer=Bytes(), seq_len=4, batch_size=1, infinite=False))
    assert caplog.messages == [f"skipped {tmp_path / 'a.jsonl:0'}: {reason}"]


def test_a_row_of_parquet_without_text_is_null(tmp_path: Path):
    write_parquet(tmp_path / "a.parquet", {"text": ["one", None]})
    source = text_directory(tmp_path)
    assert source.why_no_text(source.documents[1]) == "its 'text' is null"


def test_each_row_of_a_parquet_file_is_a_document(tmp_path: Path):
    write_parquet(tmp_path / "a.parquet", {"text": [*TEXTS, None], "n": [1, 2, 3, 4]})
    source = text_directory(tmp_path)
    assert texts_of(source) == [*TEXTS, None]
    assert [each.name for each in source.documents] == [f"a.parquet:{row}" for row in range(4)]
    assert [each.read_with for each in source.documents] == [
        *["a.parquet:0"] * 2,
        *["a.parquet:1"] * 2,
    ]


def test_another_field_has_the_text_if_asked(tmp_path: Path):
    write_json_lines(tmp_path / "a.jsonl", {"content": "one", "text": "other"})
    write_parquet(tmp_path / "b.parquet", {"content": ["two"]})
    assert texts_of(text_directory(tmp_path, text_field="content")) == ["one", "two"]


def test_all_kinds_of_files_are_one_source(tmp_path: Path):
    (tmp_path / "c.txt").write_text("three")
    write_parquet(tmp_path / "b.parquet", {"text": ["two"]})
    write_json_lines(tmp_path / "a.jsonl", {"text": "one"})
    assert texts_of(text_directory(tmp_path)) == ["one", "two", "three"]


def test_a_file_without_rows_adds_nothing_and_alone_is_refused(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(TextSourceError) as error:
        text_directory(tmp_path)
    assert str(error.value) == f"no file of the text folder {str(tmp_path)!r} has a row in it"


def test_a_field_that_is_not_there_is_named_with_those_that_are(tmp_path: Path):
    write_parquet(tmp_path / "a.parquet", {f"column_{at}": ["x"] for at in range(10)})
    with pytest.raises(TextSourceError) as error:
        text_directory(tmp_path)
    listed = ", ".join(repr(f"column_{at}") for at in range(8))
    assert str(error.value) == (
        f"{str(tmp_path / 'a.parquet')!r} has no field 'text'; it has {listed} and 2 more: name "
        "the one with the text by --dataloader.text_field"
    )


def test_a_column_of_numbers_is_refused(tmp_path: Path):
    write_parquet(tmp_path / "a.parquet", {"text": [1, 2]})
    with pytest.raises(TextSourceError, match=r"'text' of .* is int64, and no text"):
        text_directory(tmp_path)


def test_a_parquet_file_that_is_none_is_refused_by_name(tmp_path: Path):
    (tmp_path / "a.parquet").write_bytes(b"not at all")
    with pytest.raises(TextSourceError, match=r"a\.parquet' is no Parquet file: "):
        text_directory(tmp_path)


def test_neighbours_in_a_row_group_are_read_one_after_the_other(tmp_path: Path):
    write_parquet(
        tmp_path / "a.parquet", {"text": [f"{at:04}" for at in range(64)]}, rows_of_group=8
    )
    packed = PackedText(text_directory(tmp_path), tokenizer=Bytes(), seq_len=4, batch_size=1)
    blocks = [document.block for document in packed._order(0)]
    assert sorted(set(blocks)) == list(range(8))
    assert sum(a != b for a, b in pairwise(blocks)) == 7
    assert blocks != sorted(blocks)


def test_refuses_to_resume_in_another_field_of_the_same_rows(tmp_path: Path):
    write_json_lines(tmp_path / "a.jsonl", {"text": "one", "summary": "two"})

    def stream(field: str) -> PackedText:
        source = text_directory(tmp_path, text_field=field)
        return PackedText(source, tokenizer=Bytes(), seq_len=4, batch_size=1)

    with pytest.raises(DataResumeError) as error:
        stream("summary").load_state_dict(stream("text").state_dict())
    assert "stopped: text_field (saved 'text', now 'summary') changed; " in str(error.value)


def test_the_field_does_not_matter_where_there_are_no_rows(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one")
    source = text_directory(tmp_path, text_field="summary")
    assert (
        "text_field"
        not in PackedText(source, tokenizer=Bytes(), seq_len=4, batch_size=1).state_dict()
    )


def test_a_stream_over_rows_resumes_where_it_stopped(tmp_path: Path):
    write_json_lines(tmp_path / "a.jsonl", *({"text": f"line {at}"} for at in range(20)))
    write_parquet(tmp_path / "b.parquet", {"text": [f"row {at}" for at in range(20)]})

    def stream() -> PackedText:
        return PackedText(text_directory(tmp_path), tokenizer=Bytes(), seq_len=16, batch_size=2)

    whole, first = iter(stream()), stream()
    expected = [next(whole)[1].tolist() for _ in range(12)]
    batches = iter(first)
    found = [next(batches)[1].tolist() for _ in range(5)]
    second = stream()
    second.load_state_dict(first.state_dict())
    rest = iter(second)
    assert [*found, *(next(rest)[1].tolist() for _ in range(7))] == expected
