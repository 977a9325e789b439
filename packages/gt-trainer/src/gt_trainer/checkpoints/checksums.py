"""``checksums.json``: the SHA-256 of every file of a checkpoint, written when it was saved.

A weight of which some bytes were overwritten on the disk loads, and trains on with another loss,
without a word. So a save writes down what it wrote, and a load compares before it reads. This tells
damage; it does not tell who wrote a file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

CHECKSUMS = "checksums.json"
"""The file's name, in a checkpoint's folder."""

_FORMAT = "gt-trainer checksums 1"
_CHUNK_BYTES = 4 * 2**20


class ChecksumsUnreadableError(ValueError):
    """What a checkpoint's file of checksums says cannot be understood."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksums:
    """What the files of a checkpoint were when they were saved."""

    sha256: Mapping[str, str]
    """Hexadecimal digests by the files' names in the checkpoint's folder."""

    def write(self, folder: Path) -> None:
        """Write them into a folder, whole and durable before they have their name."""
        temporary = folder / f"{CHECKSUMS}.tmp"
        document = {"format": _FORMAT, "sha256": dict(sorted(self.sha256.items()))}
        with temporary.open("w") as stream:
            json.dump(document, stream, indent=1)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(folder / CHECKSUMS)
        make_names_durable(folder)

    def damages(self, folder: Path, names: Iterable[str]) -> Iterator[str]:
        """Yield, in words, each file that is not what was saved.

        Args:
            folder: of the checkpoint.
            names: of the files to read, all of each.
        """
        for name in names:
            saved = self.sha256.get(name)
            if saved is None:
                yield f"{name} was not there when it was saved"
                continue
            try:
                is_what_was_saved = sha256_of(folder / name) == saved
            except FileNotFoundError:
                yield f"{name} is missing"
            except OSError as error:
                yield f"{name} cannot be read ({error.strerror})"
            else:
                if not is_what_was_saved:
                    yield f"{name} is not what was saved"


def read_checksums(folder: Path) -> Checksums | None:
    """Read the checksums of a checkpoint; None if it was saved without.

    Raises:
        ChecksumsUnreadableError: They are damaged themselves.
    """
    try:
        document = json.loads((folder / CHECKSUMS).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ChecksumsUnreadableError(
            f"{CHECKSUMS} cannot be read ({type(error).__name__})"
        ) from error
    sha256 = document.get("sha256") if isinstance(document, dict) else None
    if (
        not isinstance(sha256, dict)
        or document.get("format") != _FORMAT
        or not all(isinstance(each, str) for each in sha256.values())
    ):
        raise ChecksumsUnreadableError(f"{CHECKSUMS} is none that this version wrote")
    return Checksums(sha256=sha256)


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def make_names_durable(folder: Path) -> None:
    """Have the disk keep which files a folder has: names are not written with a file's bytes.

    Some file systems of networks do not offer it, and keep names in their own way.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)
