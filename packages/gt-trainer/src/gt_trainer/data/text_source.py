"""Folders of text files as training documents; the standard library's sources above all.

Every machine that runs us has some megabytes of text with real structure, and needs no network
to read them: the sources of the Python that is running. They live here, apart from the
dataloader, because building the tokenizer needs them too, and needs no torch.

One file is one document. Documents are ordered by their path relative to the root, and fall
into a training and a validation split by a hash of that path alone: a document never changes
sides when others come or go, and validation never sees a training document.
"""

import fnmatch
import hashlib
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "validation"]

DEFAULT_VALIDATION_FRACTION = 0.05
"""Share of the documents that go to validation (by expectation: it is a hash that decides)."""

TEXT_SUFFIXES = (".md", ".py", ".txt")
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


class TextSourceError(ValueError):
    """There is no usable text where it was looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One file of a text source.

    Args:
        path: Path relative to the source's root, with forward slashes on every system.
        num_bytes: Size of the file.
    """

    path: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """An ordered, non-empty collection of text files under one folder.

    Args:
        name: What messages call it.
        root: The folder.
        documents: The files, sorted by relative path.
    """

    name: str
    root: Path
    documents: tuple[Document, ...]

    def read(self, document: Document) -> str | None:
        """Return the document's text, or None if it is not valid UTF-8.

        Raises:
            OSError: The file cannot be read, or is gone.
        """
        try:
            return (self.root / document.path).read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            return None

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
            if (_hash_fraction(document.path) < validation_fraction) == (split == "validation")
        )
        if not chosen:
            raise TextSourceError(
                f"the {split} split of {self.name} is empty: it has {len(self.documents)} "
                f"document(s), of which a share of {validation_fraction} goes to validation by a "
                "hash of each path; use more files, or another validation_fraction"
            )
        return TextSource(name=f"{self.name} ({split})", root=self.root, documents=chosen)


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
    documents = _find_documents(root, suffixes=(".py",), excluded=_NOT_STDLIB_TEXT)
    version = ".".join(str(part) for part in sys.version_info[:3])
    name = f"the standard library of Python {version}"
    return TextSource(name=name, root=root, documents=documents)


def text_directory(path: str | Path) -> TextSource:
    """Return every .md, .py and .txt file below a folder, hidden folders and caches apart.

    Raises:
        TextSourceError: The path is no folder, or holds no such file.
    """
    root = Path(path)
    if not root.is_dir():
        problem = "is a file" if root.exists() else "does not exist"
        raise TextSourceError(
            f"text folder {str(path)!r} {problem}; give a folder of {_listed(TEXT_SUFFIXES)} files"
        )
    documents = _find_documents(root, suffixes=TEXT_SUFFIXES, excluded=_NOT_USER_TEXT)
    if not documents:
        raise TextSourceError(
            f"text folder {str(path)!r} has no {_listed(TEXT_SUFFIXES)} file, also not in its "
            "subfolders"
        )
    return TextSource(name=repr(str(path)), root=root, documents=documents)


def _find_documents(
    root: Path, *, suffixes: tuple[str, ...], excluded: tuple[str, ...]
) -> tuple[Document, ...]:
    def is_excluded(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in excluded)

    def refuse(error: OSError) -> None:
        raise error  # os.walk would otherwise leave out what it cannot read, silently

    documents = []
    for folder, subfolders, files in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not is_excluded(name)]
        for name in files:
            if not name.endswith(suffixes) or is_excluded(name):
                continue
            path = Path(folder, name)
            if path.is_file():  # a dangling link is no document
                relative = path.relative_to(root).as_posix()
                documents.append(Document(path=relative, num_bytes=path.stat().st_size))
    return tuple(sorted(documents, key=lambda document: document.path))


def _hash_fraction(path: str) -> float:
    """Map a path to [0, 1), the same on every machine, in every version of Python."""
    digest = hashlib.sha256(path.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _listed(suffixes: tuple[str, ...]) -> str:
    return ", ".join(suffixes[:-1]) + f" or {suffixes[-1]}"
