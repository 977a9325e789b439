"""Folders of text as training documents; the standard library's sources above all.

Every machine that runs us has some megabytes of text with real structure, and needs no network
to read them: the sources of the Python that is running. They live here, apart from the
dataloader, because building the tokenizer needs them too, and needs no torch.

A text file is one document, and so is a row of a file of JSON lines or a Parquet file
(``document_files``). Documents are ordered by their path relative to the root and their place in
the file, and fall into a training and a validation split by a hash of these alone: a file never
changes sides when others come or go, and validation never sees a training document. Rows are not
known by their text: one that is put in or taken out renames those after it in its file, and they
may change sides. Appended rows and new files change nothing for the others.
"""

import fnmatch
import hashlib
import os
import sys
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gt_trainer.data.document_files import (
    JSON_LINES,
    PARQUET,
    Document,
    TextSourceError,
    documents_of,
    read_document,
    why_no_text,
)

Split = Literal["train", "validation"]

DEFAULT_VALIDATION_FRACTION = 0.05
"""Share of the documents that go to validation (by expectation: it is a hash that decides)."""

DEFAULT_TEXT_FIELD = "text"
"""Field or column with the text, of files with rows."""

TEXT_SUFFIXES = (JSON_LINES, ".md", PARQUET, ".py", ".txt")
"""What a user's folder is searched for."""

# Beside the standard library in its folder, or in it and no text that a person wrote: other
# packages, tests (half the bytes, and much of it generated), tables, and the build's own paths.
_NOT_STDLIB_TEXT = (
    "__pycache__",
    "config-*",
    "dist-packages",
    "encodings",
    "idle_test",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "_sysconfigdata*",
    "sitecustomize.py",
    "usercustomize.py",
)
_NOT_USER_TEXT = (".*", "__pycache__", "site-packages", "node_modules")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """An ordered, non-empty collection of documents under one folder.

    Args:
        name: What messages call it.
        root: The folder.
        documents: By relative path, and by their place in the file.
        text_field: Field or column with the text, of files with rows.
    """

    name: str
    root: Path
    documents: tuple[Document, ...]
    text_field: str = DEFAULT_TEXT_FIELD

    def read(self, document: Document) -> str | None:
        """Return the document's text, None if it is not valid UTF-8 or a row without text.

        Raises:
            TextSourceError: A row has no such field.
            OSError: The file cannot be read, or is gone.
        """
        return read_document(self.root, document, text_field=self.text_field)

    def why_no_text(self, document: Document) -> str:
        """Say why ``read`` returns None.

        Raises:
            As ``read``.
        """
        return why_no_text(self.root, document, text_field=self.text_field)

    def split(
        self, split: Split, *, validation_fraction: float = DEFAULT_VALIDATION_FRACTION
    ) -> "TextSource":
        """Return the documents of one side.

        Args:
            split: Which side.
            validation_fraction: Expected share of documents in "validation", at least 0 and
                less than 1.

        Raises:
            TextSourceError: The side is empty, or the fraction is out of range.
        """
        if not 0 <= validation_fraction < 1:
            raise TextSourceError(
                f"validation_fraction is {validation_fraction!r}; it must be at least 0 and "
                "less than 1"
            )
        chosen = tuple(
            document
            for document in self.documents
            if (_hash_fraction(document.name) < validation_fraction) == (split == "validation")
        )
        if not chosen:
            raise TextSourceError(
                f"the {split} split of {self.name} is empty: it has {len(self.documents)} "
                f"document(s), of which a share of {validation_fraction} goes to validation by a "
                "hash of each path; use more files, or another validation_fraction"
            )
        return replace(self, name=f"{self.name} ({split})", documents=chosen)


def python_stdlib() -> TextSource:
    """Return the standard library's sources of the running interpreter.

    Without installed packages, tests, generated tables, and files that hold the paths of one
    machine. About 10 MB in Python 3.11.

    Raises:
        TextSourceError: This interpreter has no sources: zipped, or compiled files only.
    """
    root = Path(sysconfig.get_path("stdlib"))
    if not (root / "os.py").is_file():
        raise TextSourceError(
            f"no Python sources in {str(root)!r}, where {sys.executable!r} has its standard "
            "library (zipped, or compiled files only); give a folder of "
            f"{_listed(TEXT_SUFFIXES)} files with --dataloader.dataset_path"
        )
    files = _find_files(root, suffixes=(".py",), excluded=_NOT_STDLIB_TEXT)
    documents = _documents(root, files, text_field=DEFAULT_TEXT_FIELD)
    version = ".".join(str(part) for part in sys.version_info[:3])
    name = f"the standard library of Python {version}"
    return TextSource(name=name, root=root, documents=documents)


def text_directory(path: str | Path, *, text_field: str = DEFAULT_TEXT_FIELD) -> TextSource:
    """Return the documents of every text, JSON lines and Parquet file below a folder.

    Hidden folders and caches are left out. Text files are those that end in .md, .py or .txt.

    Args:
        path: The folder.
        text_field: Field or column with the text, of files with rows.

    Raises:
        TextSourceError: The path is no folder, holds no such file or none with a row in it, or a
            Parquet file is damaged or has no such column.
    """
    root = Path(path)
    if not root.is_dir():
        problem = "is a file" if root.exists() else "does not exist"
        raise TextSourceError(
            f"text folder {str(path)!r} {problem}; give a folder of {_listed(TEXT_SUFFIXES)} files"
        )
    files = _find_files(root, suffixes=TEXT_SUFFIXES, excluded=_NOT_USER_TEXT)
    if not files:
        raise TextSourceError(
            f"text folder {str(path)!r} has no {_listed(TEXT_SUFFIXES)} file, also not in its "
            "subfolders"
        )
    documents = _documents(root, files, text_field=text_field)
    if not documents:
        raise TextSourceError(f"no file of the text folder {str(path)!r} has a row in it")
    return TextSource(name=repr(str(path)), root=root, documents=documents, text_field=text_field)


def _documents(root: Path, files: list[str], *, text_field: str) -> tuple[Document, ...]:
    return tuple(
        document
        for relative in files
        for document in documents_of(root / relative, relative=relative, text_field=text_field)
    )


def _find_files(root: Path, *, suffixes: tuple[str, ...], excluded: tuple[str, ...]) -> list[str]:
    """Paths relative to the root, sorted."""

    def is_excluded(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in excluded)

    def refuse(error: OSError) -> None:
        raise error  # os.walk would otherwise leave out what it cannot read, silently

    found = []
    for folder, subfolders, files in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not is_excluded(name)]
        for name in files:
            if not name.endswith(suffixes) or is_excluded(name):
                continue
            path = Path(folder, name)
            if path.is_file():  # a dangling link is no document
                found.append(path.relative_to(root).as_posix())
    return sorted(found)


def _hash_fraction(path: str) -> float:
    """Map a path to [0, 1), the same on every machine, in every version of Python."""
    digest = hashlib.sha256(path.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _listed(suffixes: tuple[str, ...]) -> str:
    return ", ".join(suffixes[:-1]) + f" or {suffixes[-1]}"
