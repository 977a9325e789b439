"""One file: an identity, and named sections of JSON or plain bytes.

::

    gt-artifact 2 <bytes of the header> <SHA-256 of the header>
    {"kind": "...", "fingerprint": {...},
     "sections": [{"name": "...", "media": "json", "bytes": 123, "sha256": "..."}, ...]}
    the sections, one after another, to the end of the file

The header is indented for people who look; a JSON section is one line. What a file says of itself
is believed of nothing: sizes must add up to that of the file before any memory is asked for, and a
section is compared with its SHA-256 before it is parsed. No name in a file is followed, imported or
evaluated. Whose file it is, the kind and the fingerprint, is settled before any section is read.

A SHA-256 finds what was damaged. It does not say who wrote it: whoever may write to the folder can
write a container that is whole, so that what a section means is for its reader to check.

Imports no torch, so that tools may look at files cheaply. A table of sections in front of plain
bytes is an old idea; safetensors (huggingface/safetensors) keeps tensors so.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Literal

from gt_config import Fingerprint, refuse_stale
from gt_config.fingerprint import FINGERPRINT_FORMAT
from gt_trace.artifacts.atomic_file import write_atomically
from gt_trace.artifacts.regular_file import open_regular
from gt_trace.artifacts.strict_json import json_bytes, parse_json
from gt_trace.errors import ArtifactDamagedError, ArtifactError, ArtifactVersionError
from gt_trace.garbage_collection import held_garbage_collection

CONTAINER_FORMAT = 7
"""Raised by one whenever the header, or what any section means, changes."""

MAX_HEADER_BYTES = 2**26
MAX_SECTION_BYTES: Mapping[str, int] = MappingProxyType({"json": 2**28, "bytes": 2**32})
"""By media. A document takes up to some twenty times its size when it is parsed."""

_MAGIC = b"gt-artifact "
_VERSION = re.compile(rb"gt-artifact ([1-9][0-9]{0,8}) ")
_FIRST_LINE = re.compile(rb"gt-artifact [0-9]+ ([1-9][0-9]{0,8}) ([0-9a-f]{64})\n")
_FIRST_LINE_BYTES = 128
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SECTION_KEYS = frozenset({"name", "media", "bytes", "sha256"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSection:
    """What a header says of one section, and where that puts it."""

    name: str
    media: Literal["json", "bytes"]
    num_bytes: int
    sha256: str
    """Of its bytes, in hexadecimal digits."""

    start: int
    """Its first byte, counted from the beginning of the file."""


def write_container(
    destination: BinaryIO | str | os.PathLike[str],
    *,
    kind: str,
    fingerprint: Fingerprint,
    documents: Mapping[str, object],
    blobs: Mapping[str, bytes | bytearray | memoryview],
) -> None:
    """Write a container; equal content in equal order gives equal bytes.

    Args:
        destination: an open file; or a path, which gets all of it or is left as it was, and whose
            folder is made if missing.
        kind: what the sections are together, a short text; whoever opens the file asks for it.
        fingerprint: of all that went into the content.
        documents: by the names of their sections: dicts, lists and scalars. Dicts keep their order;
            tuples become lists, and keys that are scalars texts, as ``json`` has it.
        blobs: contiguous bytes by the names of their sections.

    Raises:
        ArtifactError: a section is larger than ``MAX_SECTION_BYTES``, or the operating system
            refused to write to a path.
        TypeError: a document holds something that JSON has not.
        ValueError: a document and a blob have one name, or a document nests too deeply, or in
            itself, or holds a text that is no Unicode.
    """
    if shared := sorted({*documents} & {*blobs}):
        raise ValueError(f"these names are of a document and of a blob: {', '.join(shared)}")
    contents: list[tuple[str, str, bytes | bytearray | memoryview]] = [
        *((name, "json", json_bytes(document)) for name, document in documents.items()),
        *((name, "bytes", blob) for name, blob in blobs.items()),
    ]
    parts: list[bytes | memoryview] = []
    table: list[dict[str, object]] = []
    for name, media, content in contents:
        part = memoryview(content)
        if part.nbytes > MAX_SECTION_BYTES[media]:
            raise ArtifactError(
                f"section {name!r} has {part.nbytes:,} bytes, and one of media {media!r} may have "
                f"{MAX_SECTION_BYTES[media]:,}"
            )
        digest = hashlib.sha256(part).hexdigest()
        table.append({"name": name, "media": media, "bytes": part.nbytes, "sha256": digest})
        parts.append(part)
    identity = parse_json(fingerprint.to_json().encode("utf-8"))
    header = json_bytes({"kind": kind, "fingerprint": identity, "sections": table}, indent=1)
    if len(header) > MAX_HEADER_BYTES:
        raise ArtifactError(
            f"the header has {len(header):,} bytes, and may have {MAX_HEADER_BYTES:,}"
        )
    digest = hashlib.sha256(header).hexdigest()
    parts = [f"gt-artifact {CONTAINER_FORMAT} {len(header)} {digest}\n".encode(), header, *parts]
    if isinstance(destination, str | os.PathLike):
        write_atomically(Path(destination), lambda file: _write_parts(file, parts))
    else:
        _write_parts(destination, parts)


def _write_parts(file: BinaryIO, parts: list[bytes | memoryview]) -> None:
    for part in parts:
        file.write(part)


class Container:
    """An open container: its identity, and its sections when they are asked for.

    It keeps its file open, so that a file that is replaced or removed meanwhile is read to its end.
    Use it in a ``with``. One thread at a time.
    """

    __slots__ = ("_file", "fingerprint", "kind", "path", "sections", "sha256")

    def __init__(
        self,
        *,
        file: BinaryIO,
        path: Path,
        kind: str,
        fingerprint: Fingerprint,
        sections: Mapping[str, ContainerSection],
        sha256: str,
    ) -> None:
        self._file = file
        self.path = path
        self.kind = kind
        self.fingerprint = fingerprint
        self.sections = MappingProxyType(dict(sections))
        """By name, in the order of the file."""

        self.sha256 = sha256
        """Of the header, in which the SHA-256 of each section stands: equal ones, equal content."""

    def document(self, name: str) -> Any:
        """The JSON document of a section.

        Raises:
            ArtifactDamagedError: there is no such document, its bytes are not those of its SHA-256,
                or they are not JSON as ``parse_json`` takes it.
            ArtifactError: the file cannot be read.
        """
        raw = self._section(name, "json")
        try:
            with held_garbage_collection():
                return parse_json(raw)
        except ValueError as error:
            raise _damaged(self.path, f"its section {name!r} is no strict JSON: {error}") from error

    def blob(self, name: str) -> bytes:
        """The bytes of a section.

        Raises:
            ArtifactDamagedError: there is no such blob, or its bytes are not those of its SHA-256.
            ArtifactError: the file cannot be read.
        """
        return self._section(name, "bytes")

    def verify(self) -> None:
        """Read and check every section, and keep none.

        Raises:
            ArtifactDamagedError: as for ``document`` and ``blob``.
            ArtifactError: the file cannot be read.
        """
        for section in self.sections.values():
            self.document(section.name) if section.media == "json" else self.blob(section.name)

    def close(self) -> None:
        """Close the file; sections cannot be read after that."""
        self._file.close()

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _section(self, name: str, media: str) -> bytes:
        section = self.sections.get(name)
        if section is None or section.media != media:
            there = ", ".join(f"{s.name!r} ({s.media})" for s in self.sections.values())
            raise _damaged(
                self.path, f"it has no section {name!r} of media {media!r}, but {there or 'none'}"
            )
        with _reading(self.path):
            self._file.seek(section.start)
            raw = self._file.read(section.num_bytes)
        if hashlib.sha256(raw).hexdigest() != section.sha256:
            raise _damaged(self.path, f"the SHA-256 of its section {name!r} is another")
        return raw


def open_container(
    path: str | os.PathLike[str], *, kind: str, fingerprint: Fingerprint | None
) -> Container:
    """Open a container that this run may use; reads its header alone.

    What is refused first comes first below.

    Args:
        path: of a file that ``write_container`` wrote.
        kind: what it must hold.
        fingerprint: this run's. None is for tools that look at a file and run nothing of it:
            whatever the file claims to be is then taken for granted.

    Raises:
        ArtifactError: it cannot be read: missing, for one.
        ArtifactVersionError: it is of another format.
        ArtifactDamagedError: it is no container, or its header is not what was written.
        ArtifactError: it holds another kind of thing.
        StaleFingerprintError: (gt-config's) it was made for another run; names every field that
            differs.
    """
    path = Path(path)
    with _reading(path):
        file = io.BufferedReader(open_regular(path))
    file_bytes = os.fstat(file.fileno()).st_size
    try:
        container = _read_header(file, path, file_bytes)
        if container.kind != kind:
            raise ArtifactError(
                f"{path} holds a {container.kind[:100]!r}, and a {kind!r} is asked for"
            )
        if fingerprint is not None:
            refuse_stale(stored=container.fingerprint, current=fingerprint)
    except BaseException:
        file.close()
        raise
    return container


def _read_header(file: BinaryIO, path: Path, file_bytes: int) -> Container:
    with _reading(path):
        line = file.readline(_FIRST_LINE_BYTES)
    if not line.startswith(_MAGIC):
        raise _damaged(path, f"it does not begin with {_MAGIC.decode()!r}, as artifacts do")
    # What comes after the version is for that version to say.
    version = _VERSION.match(line)
    if version is not None and int(version[1]) != CONTAINER_FORMAT:
        raise ArtifactVersionError(
            f"{path} is an artifact of format {int(version[1])}, and this gt-trace reads format "
            f"{CONTAINER_FORMAT}: capture again"
        )
    first = _FIRST_LINE.fullmatch(line)
    if version is None or first is None:
        raise _damaged(path, "its first line is not whole")
    header_bytes = int(first[1])
    start = len(line) + header_bytes
    if header_bytes > MAX_HEADER_BYTES or start > file_bytes:
        raise _damaged(
            path,
            f"its header would have {header_bytes:,} bytes, of {file_bytes - len(line):,} that "
            f"there are and {MAX_HEADER_BYTES:,} that it may have",
        )
    with _reading(path):
        raw = file.read(header_bytes)
    if hashlib.sha256(raw).hexdigest() != first[2].decode():
        raise _damaged(path, "the SHA-256 of its header is another")
    try:
        header = parse_json(raw)
    except ValueError as error:
        raise _damaged(path, f"its header is no strict JSON: {error}") from error
    if not isinstance(header, dict) or {*header} != {"kind", "fingerprint", "sections"}:
        raise _damaged(path, "a header has exactly the keys 'kind', 'fingerprint' and 'sections'")
    if not isinstance(header["kind"], str):
        raise _damaged(path, f"its kind is {header['kind']!r}, which is no text")
    return Container(
        file=file,
        path=path,
        kind=header["kind"],
        fingerprint=_fingerprint(header["fingerprint"], path),
        sections=_sections(header["sections"], path=path, start=start, file_bytes=file_bytes),
        sha256=first[2].decode(),
    )


def _fingerprint(document: Any, path: Path) -> Fingerprint:
    try:
        return Fingerprint.from_json(json_bytes(document).decode("utf-8"))
    except ValueError as error:  # FingerprintDocumentError, or a text that is no Unicode
        format_number = document.get("format") if isinstance(document, dict) else None
        if isinstance(format_number, int) and format_number != FINGERPRINT_FORMAT:
            raise ArtifactVersionError(f"{path}: {error}") from error
        raise _damaged(path, str(error)) from error


def _sections(
    table: Any, *, path: Path, start: int, file_bytes: int
) -> dict[str, ContainerSection]:
    if not isinstance(table, list):
        raise _damaged(path, "its table of sections is no list")
    sections: dict[str, ContainerSection] = {}
    for number, entry in enumerate(table):
        if not isinstance(entry, dict) or {*entry} != _SECTION_KEYS:
            keys = ", ".join(repr(key) for key in sorted(_SECTION_KEYS))
            raise _damaged(path, f"section {number} has not exactly the keys {keys}")
        name, media, num_bytes, sha256 = (entry[k] for k in ("name", "media", "bytes", "sha256"))
        if not isinstance(name, str) or name in sections:
            raise _damaged(path, f"section {number} is named {name!r}: no text, or not the first")
        if not isinstance(media, str) or media not in MAX_SECTION_BYTES:
            raise _damaged(path, f"section {name!r} is of media {media!r}, not 'json' or 'bytes'")
        if type(num_bytes) is not int or not 0 <= num_bytes <= MAX_SECTION_BYTES[media]:
            raise _damaged(
                path,
                f"section {name!r} has {num_bytes!r} bytes, not 0 to {MAX_SECTION_BYTES[media]}",
            )
        if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            raise _damaged(path, f"section {name!r} has the SHA-256 {sha256!r}")
        sections[name] = ContainerSection(
            name=name,
            media="json" if media == "json" else "bytes",
            num_bytes=num_bytes,
            sha256=sha256,
            start=start,
        )
        start += num_bytes
    if start != file_bytes:
        raise _damaged(
            path, f"its sections end at byte {start:,}, and the file has {file_bytes:,} bytes"
        )
    return sections


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from error


def _damaged(path: Path, problem: str) -> ArtifactDamagedError:
    # A header may say anything, for up to 64 MiB.
    shown = problem if len(problem) <= 500 else f"{problem[:500]}..."
    return ArtifactDamagedError(f"{path} is damaged: {shown}; capture again")
