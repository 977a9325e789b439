"""A folder of artifacts that jobs and ranks share, perhaps over a network file system.

::

    <folder>/<digest of a fingerprint>/<name>      entries, complete or absent
    <folder>/<digest of a fingerprint>/.writing-*  what somebody is writing, or was when killed
    <folder>/damaged/<digest>-<name>-<n>           what was found damaged, and in -<n>.txt why

Nobody locks anything: locks of processes that were killed, or of machines that are gone, are what
network file systems are worst at. Every change is one rename or one removal instead, and whoever
finds that somebody else was faster goes on. Imports no torch.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from gt_trace.artifacts.atomic_file import TEMPORARY_PREFIX, write_atomically
from gt_trace.errors import ArtifactError

LEFTOVER_SECONDS = 3600.0
"""A temporary file that nobody has written to for so long belongs to nobody."""

MAX_DAMAGED = 16
"""How many damaged entries are kept to be looked at."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
_DAMAGED = "damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderEntry:
    """One artifact in a folder."""

    digest: str
    """Of the fingerprint that it belongs to."""

    name: str
    path: Path
    num_bytes: int
    last_used: float
    """When it was written or last found, in seconds since 1970, by the file system's clock."""


@dataclass(frozen=True, slots=True)
class ArtifactFolder:
    """Artifacts by the digest of their fingerprint and a name; made at the first write.

    Raises:
        ValueError: ``max_bytes`` is not positive.
    """

    path: Path
    max_bytes: int | None = field(kw_only=True)
    """What all entries may take together; None for no limit. What is damaged does not count, nor
    what is being written; entries of the digest that was written last stay whatever they take."""

    def __post_init__(self) -> None:
        if self.max_bytes is not None and self.max_bytes <= 0:
            raise ValueError(
                f"max_bytes is {self.max_bytes!r}: allowed are positive numbers, and None for no "
                "limit"
            )

    def write(self, digest: str, name: str, write: Callable[[BinaryIO], None]) -> Path:
        """Write an entry, or replace it; then remove what others left, and what is too much.

        An entry is complete or absent, whoever else writes it and whenever somebody is killed.
        Over ``max_bytes``, whole digests are removed, those that were not used for longest first.

        Args:
            digest: of the fingerprint that it belongs to, 64 hexadecimal digits.
            name: up to 100 lower-case letters, digits, ``.``, ``_`` and ``-``; a letter or a digit
                comes first.
            write: writes to the open file that it is given.

        Returns:
            Where the entry is.

        Raises:
            ArtifactError: the operating system refused; the text has the path and the reason, and
                nothing is left.
            ValueError: ``digest`` or ``name`` is something else.
        """
        path = self._entry_path(digest, name)
        write_atomically(path, write)
        self._remove_leftovers(path)
        if self.max_bytes is not None:
            self._evict(self.max_bytes, keep=digest)
        return path

    def find(self, digest: str, name: str) -> Path | None:
        """Where an entry is, which counts as a use of it; None if there is none.

        Another job may remove it before it is opened.

        Raises:
            ValueError: ``digest`` or ``name`` is not as ``write`` takes it.
        """
        path = self._entry_path(digest, name)
        if not os.path.isfile(path):  # not Path.is_file, which raises where a folder is closed
            return None
        with suppress(OSError):  # a folder may be there to be read alone
            os.utime(path)
        return path

    def writable_by_others(self, path: Path) -> Path | None:
        """The first of an entry and its folders that another user but root may have written.

        Args:
            path: as ``find`` gives it.
        """
        for each in (path, path.parent, self.path):
            try:
                status = each.stat()
            except OSError:  # gone meanwhile
                return each
            if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
                return each
        return None

    def entries(self) -> tuple[FolderEntry, ...]:
        """Every entry that can be seen, by digest and name.

        Those that another job removes meanwhile may be missing.
        """
        return tuple(
            FolderEntry(
                digest=path.parent.name,
                name=path.name,
                path=path,
                num_bytes=status.st_size,
                last_used=status.st_mtime,
            )
            for path, status in self._files()
            if _NAME.fullmatch(path.name)
        )

    def set_aside(self, path: Path, reason: str) -> Path | None:
        """Move a damaged entry out of the way, and keep it with the reason to be looked at.

        If another job has written the entry anew meanwhile, the new one is moved: that costs one
        more capture, and nothing is wrong.

        Args:
            path: of an entry, as ``find`` gives it.
            reason: what is wrong with it.

        Returns:
            Where it is now; None if another job has moved or removed it already.

        Raises:
            ArtifactError: the operating system refused; the text has the path and the reason.
            ValueError: ``path`` is of no entry of this folder.
        """
        if path != self._entry_path(path.parent.name, path.name):
            raise ValueError(f"{path} is of no entry of {self.path}")
        try:
            target, why = self._claim_aside(f"{path.parent.name}-{path.name}")
            try:
                path.replace(target)
            except OSError as error:
                why.unlink(missing_ok=True)
                if isinstance(error, FileNotFoundError):
                    return None
                raise
            why.write_text(f"{reason}\n", encoding="utf-8", errors="backslashreplace")
            self._forget_damaged()
        except OSError as error:
            raise ArtifactError(f"{path} cannot be set aside: {error.strerror or error}") from error
        return target

    def _entry_path(self, digest: str, name: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{digest!r} is no digest: those have 64 hexadecimal digits")
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} names no entry: allowed are up to 100 of a-z, 0-9, '.', '_' and '-', "
                "the first a letter or a digit"
            )
        return self.path / digest / name

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Every file of every digest, temporary ones included."""
        for folder in _sorted_listing(self.path):
            if not _DIGEST.fullmatch(folder.name):
                continue
            for path in _sorted_listing(folder):
                with suppress(OSError):
                    yield path, path.stat()

    def _remove_leftovers(self, written: Path) -> None:
        try:
            now = written.stat().st_mtime  # by the clock that the other files have their times from
        except OSError:
            return  # evicted by another job already, or out of reach for now
        for path, status in self._files():
            is_temporary = path.name.startswith(TEMPORARY_PREFIX)
            if is_temporary and now - status.st_mtime > LEFTOVER_SECONDS:
                _remove(path)

    def _evict(self, max_bytes: int, *, keep: str) -> None:
        by_digest: dict[str, list[FolderEntry]] = defaultdict(list)
        for entry in self.entries():
            by_digest[entry.digest].append(entry)
        total = sum(entry.num_bytes for held in by_digest.values() for entry in held)
        oldest_first = sorted(
            (max(entry.last_used for entry in held), digest)
            for digest, held in by_digest.items()
            if digest != keep
        )
        for _, digest in oldest_first:
            if total <= max_bytes:
                return
            for entry in by_digest[digest]:
                _remove(entry.path)
                total -= entry.num_bytes
            with suppress(OSError):  # somebody writes there
                (self.path / digest).rmdir()

    def _claim_aside(self, stem: str) -> tuple[Path, Path]:
        """A name for what is set aside that no other job has; its file of reasons says so."""
        folder = self.path / _DAMAGED
        folder.mkdir(exist_ok=True)
        number = 1
        while True:
            why = folder / f"{stem}-{number}.txt"
            try:
                why.touch(exist_ok=False)
            except FileExistsError:
                number += 1
                continue
            return why.with_suffix(""), why

    def _forget_damaged(self) -> None:
        reasons = []
        for why in (self.path / _DAMAGED).glob("*.txt"):
            with suppress(FileNotFoundError):
                reasons.append((why.stat().st_mtime_ns, why))
        for _, why in sorted(reasons)[:-MAX_DAMAGED]:
            why.with_suffix("").unlink(missing_ok=True)
            why.unlink(missing_ok=True)


def _sorted_listing(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # gone, or another user's own
        return []


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(
            f"{path} cannot be removed, so that the folder stays larger than it should: "
            f"{error.strerror or error}",
            RuntimeWarning,
            stacklevel=4,
        )
