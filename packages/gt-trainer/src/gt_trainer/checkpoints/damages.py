"""Find out whether checkpoints are what was saved, and which of them is the newest that is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torchtitan.tools.logging import logger

from gt_trainer.checkpoints.checksums import CHECKSUMS, ChecksumsUnreadableError, read_checksums
from gt_trainer.launcher import RunStoppedError
from gt_trainer.step_folders import (
    METADATA,
    has_metadata,
    is_complete,
    is_named_by_step,
    step_folders,
    step_of,
)

_MAX_TOLD = 3


class DamagedCheckpointError(RunStoppedError):
    """Files of a checkpoint are not what was saved."""


def check_on_all_ranks(folder: Path, *, is_own: bool) -> None:
    """See that a checkpoint is what was saved. Every rank calls this, and reads some of the files.

    A checkpoint without checksums is none of ours, or older than they are: it is loaded as it is,
    and the log says so.

    Args:
        folder: of the checkpoint, which all ranks see.
        is_own: whether the run itself saved it, and resumes from it.

    Raises:
        DamagedCheckpointError: It is not, said by every rank alike.
    """
    if not (folder / CHECKSUMS).exists():
        logger.warning(f"{folder} has no {CHECKSUMS}: whether it is intact is not known")
    damages = _damages_by_all_ranks(folder)
    if not damages:
        return
    others: list[list[Path]] = [_others(folder) if dist.get_rank() == 0 else []]
    dist.broadcast_object_list(others)
    intact = next((path for path in others[0] if not _damages_by_all_ranks(path)), None)
    raise DamagedCheckpointError(
        f"the checkpoint {folder} is damaged: {_told(damages)}\n  {_advice(intact, is_own)}"
    )


def check_step(folder: Path, step: int) -> None:
    """Compare the step that a run has loaded with the name of the checkpoint's folder.

    Raises:
        DamagedCheckpointError: They differ.
    """
    if step_of(folder) != step:
        raise DamagedCheckpointError(
            f"the checkpoint {folder} holds step {step}: name its folder step-{step}, or choose "
            "another --dump_folder"
        )


def damages_of(folder: Path, *, rank: int = 0, num_ranks: int = 1) -> list[str]:
    """Return, in words, what of a checkpoint is not what was saved.

    One without checksums has none that could be told.

    Args:
        folder: of the checkpoint.
        rank: which part of the files to read.
        num_ranks: into how many parts they are divided.
    """
    try:
        checksums = read_checksums(folder)
        if checksums is None:
            return []
        names = sorted({*checksums.sha256, *_data_files(folder)})
    except ChecksumsUnreadableError as error:
        return [str(error)]
    except OSError as error:
        return [f"it cannot be read ({error.strerror})"]
    return [*checksums.damages(folder, names[rank::num_ranks])]


def _damages_by_all_ranks(folder: Path) -> list[str]:
    """The same on all ranks, each of which reads a part."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    found: list[list[str] | None] = [None] * num_ranks
    dist.all_gather_object(found, damages_of(folder, rank=rank, num_ranks=num_ranks))
    return sorted({each for of_rank in found for each in of_rank or ()})


def _others(folder: Path) -> list[Path]:
    """The other checkpoints beside one that a run can go on from, the newest first."""
    if not is_named_by_step(folder):
        return []
    beside = [path for path in step_folders(folder.parent) if path.name != folder.name]
    return [path for path in reversed(beside) if has_metadata(path)]


def _advice(intact: Path | None, is_own: bool) -> str:
    if intact is None and is_own:
        return "No other one there is intact: start anew in another --dump_folder"
    if intact is None:
        return "Give another --checkpoint.initial_load_path"
    if is_own:
        return f"The newest intact one is {intact}: --checkpoint.load_step {step_of(intact)}"
    return f"The newest intact one beside it: --checkpoint.initial_load_path {intact}"


def _told(damages: list[str]) -> str:
    more = [f"{len(damages) - _MAX_TOLD} more"] if len(damages) > _MAX_TOLD else []
    return "; ".join([*damages[:_MAX_TOLD], *more])


def _data_files(folder: Path) -> set[str]:
    """The files in which a checkpoint's tensors are, whoever wrote them."""
    return {
        path.name
        for path in folder.iterdir()
        if path.suffix in (".distcp", ".safetensors") or path.name == METADATA
    }


def set_aside_damaged(folder: Path) -> Iterator[str]:
    """Rename the newest complete checkpoints until one is intact; yield what was done, in words.

    Args:
        folder: with the folders step-N of a run that nobody writes to.
    """
    for path in reversed([each for each in step_folders(folder) if is_complete(each)]):
        damages = damages_of(path)
        if not damages:
            return
        aside = folder / f"damaged-{step_of(path)}"
        while aside.exists():
            aside = aside.with_name(f"{aside.name}-again")
        path.rename(aside)
        yield f"{path} is damaged ({_told(damages)}), and is now {aside.name}"
