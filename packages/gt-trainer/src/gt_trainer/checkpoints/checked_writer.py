"""Write a checkpoint of PyTorch's form with its checksums, and give it its name last.

A save is complete when it has a ``.metadata``. Until then nothing may look like one, also where an
older save has the same folder, and afterwards everything that it names must be on the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from gt_trainer._torch_internals import PlainFileSystemWriter
from gt_trainer.checkpoints.checksums import CHECKSUMS, Checksums, make_names_durable
from gt_trainer.step_folders import HF_INDEX, METADATA, SHARDED


class CheckedWriter(PlainFileSystemWriter):
    """PyTorch's writer of checkpoints, which also takes down the digest of each file it writes."""

    fs: _HashedFiles

    def __init__(self, path: Path) -> None:
        """Prepare to write into a local folder, which is made if missing."""
        super().__init__(path)
        self.fs = _HashedFiles()

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As PyTorch's; first, an older save in this folder is removed."""
        clear_older_save(Path(self.path))
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As PyTorch's; each result has the digest of the file that it is in."""
        hashed: Future[list[WriteResult]] = Future()
        if not plan.items:  # PyTorch would write an empty file, of which no result tells
            hashed.set_result([])
            return hashed
        hashed.set_result(
            [
                _HashedResult(
                    index=each.index,
                    size_in_bytes=each.size_in_bytes,
                    storage_data=each.storage_data,
                    sha256=self.fs.sha256[each.storage_data.relative_path],
                )
                for each in super().write_data(plan, planner).wait()
            ]
        )
        return hashed

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """As PyTorch's, on one rank; the checksums are written before the metadata has its name."""
        for each in (result for of_rank in results for result in of_rank):
            self.fs.sha256[each.storage_data.relative_path] = cast("_HashedResult", each).sha256
        super().finish(metadata, results)


def clear_older_save(folder: Path) -> None:
    """Remove what another save left in a checkpoint's folder, what made it complete first.

    One rank calls this before any writes.
    """
    for name in (METADATA, HF_INDEX, CHECKSUMS):
        (folder / name).unlink(missing_ok=True)
    make_names_durable(folder)
    make_names_durable(folder.parent)
    for path in [*folder.glob("*.distcp"), *folder.glob("*.safetensors")]:
        path.unlink()
    shutil.rmtree(folder / SHARDED, ignore_errors=True)


@dataclass(frozen=True)
class _HashedResult(WriteResult):
    """Sent to the rank that finishes the save, where it ends: no file has it."""

    sha256: str


class _HashedFiles(FileSystem):
    """Local files whose digests are known when they have been written, by their names."""

    def __init__(self) -> None:
        self.sha256: dict[str, str] = {}

    @contextlib.contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as raw:
            if mode != "wb":
                yield raw
                return
            stream = _HashedStream(cast("io.BufferedWriter", raw))
            yield stream
            self.sha256[Path(path).name] = stream.digest.hexdigest()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Publish: PyTorch's writer renames nothing but the metadata, when all else is written."""
        old, new = Path(path), Path(new_path)
        self.sha256[new.name] = self.sha256.pop(old.name)
        Checksums.of_save(new.parent, self.sha256).write(new.parent)
        super().rename(old, new)
        make_names_durable(new.parent)


class _HashedStream(io.IOBase):
    """A file that is written from its beginning to its end, and the digest of what was written."""

    def __init__(self, raw: io.BufferedWriter) -> None:
        self._raw = raw
        self.digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | bytearray | memoryview) -> int:
        written = self._raw.write(data)
        self.digest.update(data)
        return written

    def tell(self) -> int:
        return self._raw.tell()

    def fileno(self) -> int:
        return self._raw.fileno()

    def flush(self) -> None:
        if not self._raw.closed:
            self._raw.flush()

    def close(self) -> None:
        super().close()
        self._raw.close()
