"""torchtitan's checkpoint manager, for checkpoints that are damaged or were never finished."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import futures
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
    save,
)
from torch.distributed.checkpoint.storage import WriteResult
from torchtitan.components.checkpoint import AsyncMode, CheckpointManager
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from gt_trainer._torch_internals import PlainFileSystemWriter
from gt_trainer.checkpoints.checksums import CHECKSUMS, Checksums, make_names_durable, sha256_of
from gt_trainer.checkpoints.damages import check_on_all_ranks, check_step
from gt_trainer.checkpoints.hugging_face_folder import complete_folder
from gt_trainer.checkpoints.plain_reader import PlainLoadPlanner, PlainReader
from gt_trainer.step_folders import (
    HF_INDEX,
    METADATA,
    SHARDED,
    is_complete,
    newest_checkpoint,
    step_folders,
    step_of,
)


class CheckedCheckpointManager(CheckpointManager):
    """As torchtitan's, and what is loaded is what was saved.

    Saves have checksums, loads compare them before they read, ranks sharing the files. Nothing that
    a checkpoint names is called. What purging keeps is counted in complete checkpoints. Weights in
    Hugging Face's form are left once, and not by rank too, with a config.json. Remote folders are
    torchtitan's alone.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """When checkpoints are saved, how many are kept, and what a run starts from."""

        @classmethod
        def like(cls, other: CheckpointManager.Config) -> CheckedCheckpointManager.Config:
            """Return the same flags, for this manager."""
            return cls(**{each.name: getattr(other, each.name) for each in fields(other)})

    _newest: Path | None = None
    """The folder of the newest save of this run, if that is local."""

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | AsyncSaveResponse | None:
        """As torchtitan's, with checksums.

        Args:
            state_dict: tensors and values by name.
            checkpoint_id: the folder to write.
            async_mode: what the caller waits for.
            enable_garbage_collection: whether to collect when it is done.
            to_hf: whether to write Hugging Face's form.
        """
        self._newest = None if filesystem.is_remote(checkpoint_id) else Path(checkpoint_id)
        if filesystem.is_remote(checkpoint_id) or to_hf:
            if to_hf:
                _begin_hugging_face(Path(checkpoint_id))
            saved = super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
            if to_hf:
                _finish_hugging_face(Path(checkpoint_id), self.sd_adapter)
            return saved
        writer = CheckedWriter(Path(checkpoint_id))
        found: Future[Any] | AsyncSaveResponse | None = None
        if async_mode == AsyncMode.DISABLED:
            save(state_dict, storage_writer=writer)
        elif async_mode == AsyncMode.ASYNC:
            found = async_save(state_dict, storage_writer=writer, process_group=self.pg)
        else:
            found = async_save(
                state_dict,
                storage_writer=writer,
                process_group=self.pg,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=self.stager,
            )
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return found

    def dcp_load(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        from_hf: bool,
        from_quantized: bool,
    ) -> None:
        """As torchtitan's, of a checkpoint that is what was saved.

        Args:
            state_dict: tensors and values by name, to be filled.
            checkpoint_id: the folder to read.
            from_hf: whether it has Hugging Face's form.
            from_quantized: whether that is quantized.

        Raises:
            DamagedCheckpointError: It is not, or its folder is named after another step, on every
                rank.
            pickle.UnpicklingError: It names what is no plain data.
        """
        if filesystem.is_remote(checkpoint_id):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        folder = Path(checkpoint_id)
        check_on_all_ranks(folder, is_own=folder.parent == Path(self.folder))
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        load(state_dict, storage_reader=PlainReader(checkpoint_id), planner=PlainLoadPlanner())
        if "model" in self.states:
            self.states["model"].load_state_dict(state_dict)
        state = self.states.get("train_state")
        if state is not None and folder.parent == Path(self.folder) and "train_state" in state_dict:
            check_step(folder, state.step)

    def _find_load_step(self, folder: str = "") -> int:
        """The newest complete step, by folders named step-N alone; -1 if there is none."""
        folder = folder or self.folder
        if filesystem.is_remote(folder):
            return int(super()._find_load_step(folder))
        newest = newest_checkpoint(Path(folder))
        return -1 if newest is None else step_of(newest)

    def _purge_stale_checkpoints(self) -> None:  # torchtitan leaves it unannotated
        """Delete what is older than the newest complete checkpoints that are to be kept.

        torchtitan counts folders: saves that were cut off would push out what they were to replace.
        A run that went back to an older step counts its own, and leaves those of later steps.
        """
        if not self._should_purge() or self._newest is None:
            super()._purge_stale_checkpoints()  # type: ignore[no-untyped-call]  # torchtitan
            return
        newest = step_of(self._newest)
        folders = [path for path in step_folders(Path(self.folder)) if step_of(path) <= newest]
        kept = [path for path in folders if is_complete(path)][-self.keep_latest_k :]
        if len(kept) < self.keep_latest_k:
            return
        for path in folders[: folders.index(kept[0])]:
            self.purge_queue.put(str(path))


def _begin_hugging_face(folder: Path) -> None:
    """Remove what an older save left in the folder, before any rank writes."""
    if dist.get_rank() == 0 and folder.is_dir():
        clear_older_save(folder)
    dist.barrier()


def _why_incomplete(folder: Path, adapter: object) -> str | None:
    """Complete the folder. No failure goes further: the other ranks are waiting."""
    assets: str | None = getattr(adapter, "hf_assets_path", None)
    try:
        return complete_folder(
            folder, getattr(adapter, "model_config", None), Path(assets) if assets else None
        )
    except Exception as error:  # noqa: BLE001  # whatever it is, the weights are whole without it
        return f"{type(error).__name__}: {error}"


def _finish_hugging_face(folder: Path, adapter: object) -> None:
    """Leave what transformers reads, once, with checksums, when all ranks have written theirs."""
    dist.barrier()
    if dist.get_rank() == 0:
        reason = _why_incomplete(folder, adapter)
        if reason is not None:
            logger.warning(f"{folder} has weights without config.json: {reason}")
    dist.barrier()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    digests: list[dict[str, str] | None] = [None] * num_ranks
    dist.all_gather_object(
        digests, {name: sha256_of(folder / name) for name in names[rank::num_ranks]}
    )
    if rank == 0:
        shutil.rmtree(folder / SHARDED, ignore_errors=True)
        of_all = {name: sha256 for of_rank in digests for name, sha256 in (of_rank or {}).items()}
        Checksums.of_save(folder, of_all).write(folder)
    dist.barrier()


# Write a checkpoint of PyTorch's form with its checksums, and give it its name last.
#
# A save is complete when it has a ``.metadata``. Until then nothing may look like one, also
# where an older save has the same folder, and afterwards everything that it names must be on the
# disk.
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

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> futures.Future[list[WriteResult]]:
        """As PyTorch's; each result has the digest of the file that it is in."""
        hashed: futures.Future[list[WriteResult]] = futures.Future()
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
