"""Documents of a folder: which, in what order, on which side of the split."""

import sysconfig
from pathlib import Path

import pytest

from gt_trainer.data.text_source import (
    Document,
    TextSource,
    TextSourceError,
    python_stdlib,
    text_directory,
)


def write_files(root: Path, *paths: str, content: bytes = b"text") -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)


def paths(source: TextSource) -> list[str]:
    return [document.path for document in source.documents]


def test_stdlib_holds_modules_and_leaves_out_tests_packages_and_tables() -> None:
    found = paths(python_stdlib())
    assert {"os.py", "json/__init__.py"} <= set(found)
    parts = {part for path in found for part in path.split("/")}
    assert not parts & {"site-packages", "test", "tests", "__pycache__", "encodings", "pydoc_data"}
    assert not [path for path in found if path.startswith(("_sysconfigdata", "config-"))]
    assert found == sorted(found)


def test_stdlib_is_large_enough_to_train_on() -> None:
    source = python_stdlib()
    assert len(source.documents) > 300
    assert sum(document.num_bytes for document in source.documents) > 4_000_000


def test_refuses_an_interpreter_without_sources_and_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zipped = str(tmp_path / "python311.zip")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: zipped)
    monkeypatch.setattr("sys.executable", "/opt/python")
    with pytest.raises(TextSourceError) as error:
        python_stdlib()
    assert str(error.value) == (
        f"no Python sources in {zipped!r}, where '/opt/python' has its standard library (zipped, "
        "or compiled files only); give a folder of .jsonl, .md, .parquet, .py or .txt files with "
        "--dataloader.dataset_path"
    )


def test_folder_gives_text_files_sorted_without_hidden_folders_and_caches(tmp_path: Path) -> None:
    write_files(tmp_path, "b.txt", "a/z.md", "a/c.py", "a/data.csv", ".git/notes.md")
    write_files(tmp_path, "a/__pycache__/x.py", "tests/kept.py")
    source = text_directory(tmp_path)
    assert paths(source) == ["a/c.py", "a/z.md", "b.txt", "tests/kept.py"]
    assert source.documents[0] == Document(path="a/c.py", num_bytes=4)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            "nothing",
            "text folder {path!r} does not exist; give a folder of .jsonl, .md, .parquet, .py or .txt files",
        ),
        (
            "file",
            "text folder {path!r} is a file; give a folder of .jsonl, .md, .parquet, .py or .txt files",
        ),
        (
            "empty",
            "text folder {path!r} has no .jsonl, .md, .parquet, .py or .txt file, also not in its subfolders",
        ),
    ],
)
def test_refuses_a_path_without_text_by_name(tmp_path: Path, make: str, expected: str) -> None:
    path = tmp_path / "texts"
    if make == "file":
        path.write_text("text")
    if make == "empty":
        path.mkdir()
    with pytest.raises(TextSourceError) as error:
        text_directory(path)
    assert str(error.value) == expected.format(path=str(path))


def test_reading_gives_exact_text_and_none_for_what_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("schön\r\n".encode())
    (tmp_path / "b.txt").write_bytes("schön".encode("latin-1"))
    source = text_directory(tmp_path)
    assert [source.read(document) for document in source.documents] == ["schön\r\n", None]


def test_splits_are_disjoint_complete_and_about_the_asked_share() -> None:
    source = python_stdlib()
    train, validation = paths(source.split("train")), paths(source.split("validation"))
    assert sorted(train + validation) == paths(source)
    assert not set(train) & set(validation)
    assert 0.02 < len(validation) / (len(train) + len(validation)) < 0.09


def test_a_document_keeps_its_side_when_others_come(tmp_path: Path) -> None:
    write_files(tmp_path, *(f"{i}.txt" for i in range(40)))
    before = set(paths(text_directory(tmp_path).split("validation", validation_fraction=0.3)))
    write_files(tmp_path, *(f"new/{i}.txt" for i in range(40)))
    after = set(paths(text_directory(tmp_path).split("validation", validation_fraction=0.3)))
    assert before
    assert before == {path for path in after if not path.startswith("new/")}


def test_split_depends_on_the_relative_path_alone(tmp_path: Path) -> None:
    # The paths are frozen: another hash would move documents between the sides of old runs.
    write_files(tmp_path, *(f"{i}.txt" for i in range(10)))
    split = text_directory(tmp_path).split("validation", validation_fraction=0.3)
    assert paths(split) == ["1.txt", "2.txt"]


def test_refuses_an_empty_side_and_says_why(tmp_path: Path) -> None:
    write_files(tmp_path, "3.txt")
    with pytest.raises(TextSourceError) as error:
        text_directory(tmp_path).split("validation")
    assert str(error.value) == (
        f"the validation split of {str(tmp_path)!r} is empty: it has 1 document(s), of which a "
        "share of 0.05 goes to validation by a hash of each path; use more files, or another "
        "validation_fraction"
    )


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_refuses_a_fraction_outside_its_range(tmp_path: Path, fraction: float) -> None:
    write_files(tmp_path, "only.txt")
    with pytest.raises(TextSourceError, match="it must be at least 0 and less than 1"):
        text_directory(tmp_path).split("train", validation_fraction=fraction)
