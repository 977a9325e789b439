"""``checksums.json``: the step of a checkpoint and the SHA-256 of every file, as it was saved.

A weight of which some bytes were overwritten on the disk loads, and trains on with another loss,
without a word. So a save writes down what it wrote, and a load compares before it reads. The name
of a folder can change as well, and is compared with the step. This tells damage; it does not tell
who wrote a file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gt_trace.artifacts.regular_file import open_regular, read_regular
from gt_trainer.step_folders import is_named_by_step, step_of

CHECKSUMS = "checksums.json"
"""The file's name, in a checkpoint's folder."""

_FORMAT = "gt-trainer checksums 2"
_FORMAT_WITHOUT_STEP = "gt-trainer checksums 1"
_CHUNK_BYTES = 4 * 2**20


class ChecksumsUnreadableError(ValueError):
    """What a checkpoint's file of checksums says cannot be understood."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksums:
    """What the files of a checkpoint were when they were saved."""

    sha256: Mapping[str, str]
    """Hexadecimal digests by the files' names in the checkpoint's folder."""

    step: int | None
    """The step of the checkpoint; None in the form of earlier versions, or in another folder."""

    @classmethod
    def of_save(cls, folder: Path, sha256: Mapping[str, str]) -> Checksums:
        """Return those of a save into a folder, whose name has the step."""
        return cls(sha256=sha256, step=step_of(folder) if is_named_by_step(folder) else None)

    def write(self, folder: Path) -> None:
        """Write them into a folder, whole and durable before they have their name."""
        temporary = folder / f"{CHECKSUMS}.tmp"
        saved = {"step": self.step, "sha256": dict(sorted(self.sha256.items()))}
        document = {"format": _FORMAT, **saved, "of_this": _digest(saved)}
        with temporary.open("w") as stream:
            json.dump(document, stream, indent=1)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(folder / CHECKSUMS)
        make_names_durable(folder)

    def damages(self, folder: Path, names: Iterable[str]) -> Iterator[str]:
        """Yield, in words, each file that is not what was saved, and another step than the name's.

        Args:
            folder: of the checkpoint.
            names: of the files to read, all of each.
        """
        if (problem := self.step_problem(folder)) is not None:
            yield problem
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

    def step_problem(self, folder: Path) -> str | None:
        """Return, in words, that a folder is named after another step; None if it is not."""
        if self.step is None or not is_named_by_step(folder) or step_of(folder) == self.step:
            return None
        return f"it was saved at step {self.step}, and its folder is named {folder.name}"


def read_checksums(folder: Path) -> Checksums | None:
    """Read the checksums of a checkpoint; None if it was saved without.

    Raises:
        ChecksumsUnreadableError: They are damaged themselves.
    """
    try:
        document = json.loads(read_regular(folder / CHECKSUMS))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ChecksumsUnreadableError(
            f"{CHECKSUMS} cannot be read ({type(error).__name__})"
        ) from error
    found = _understood(document)
    if found is None:
        raise ChecksumsUnreadableError(f"{CHECKSUMS} is none that this version wrote")
    return found


def _understood(document: Any) -> Checksums | None:
    if not isinstance(document, dict):
        return None
    saved = {"step": document.get("step"), "sha256": document.get("sha256")}
    if document.get("format") == _FORMAT:
        if document.get("of_this") != _digest(saved):
            return None
    elif document.get("format") != _FORMAT_WITHOUT_STEP or saved["step"] is not None:
        return None
    step, sha256 = saved["step"], saved["sha256"]
    if step is not None and type(step) is not int:
        return None
    if not isinstance(sha256, dict) or not all(map(is_file_name, sha256)):
        return None
    if not all(isinstance(each, str) for each in sha256.values()):
        return None
    return Checksums(sha256=sha256, step=step)


def _digest(saved: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(saved, sort_keys=True).encode()).hexdigest()


def is_file_name(name: object) -> bool:
    """Whether a text names a file of the folder that it is looked for in, and none elsewhere."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {*name} & {"/", "\0"}


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with open_regular(path) as stream:
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
