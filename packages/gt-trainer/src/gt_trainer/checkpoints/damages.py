"""Find out whether checkpoints are what was saved, and which of them is the newest that is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torchtitan.tools.logging import logger

from gt_trainer.checkpoints.checksums import CHECKSUMS, ChecksumsUnreadableError, read_checksums
from gt_trainer.launcher import RunStoppedError
from gt_trainer.step_folders import METADATA, is_complete, step_folders, step_of

_MAX_TOLD = 3


class DamagedCheckpointError(RunStoppedError):
    """Files of a checkpoint are not what was saved."""


def check_on_all_ranks(folder: Path) -> None:
    """See that a checkpoint is what was saved. Every rank calls this, and reads some of the files.

    A checkpoint without checksums is none of ours, or older than they are: it is loaded as it is,
    and the log says so.

    Args:
        folder: of the checkpoint, which all ranks see.

    Raises:
        DamagedCheckpointError: It is not, said by every rank alike.
    """
    try:
        checksums = read_checksums(folder)
    except ChecksumsUnreadableError as error:
        found = [str(error)]
    else:
        if checksums is None:
            logger.warning(f"{folder} has no {CHECKSUMS}: whether it is intact is not known")
            found = []
        else:
            names = sorted({*checksums.sha256, *_data_files(folder)})
            found = [*checksums.damages(folder, names[dist.get_rank() :: dist.get_world_size()])]
    all_found: list[list[str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(all_found, found)
    damages = sorted({each for of_rank in all_found for each in of_rank or ()})
    if not damages:
        return
    text = [_text_of(folder, damages) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(text)
    raise DamagedCheckpointError(text[0])


def damages_of(folder: Path) -> list[str]:
    """Return, in words, what of a checkpoint is not what was saved; all of it is read.

    One without checksums has none that could be told.
    """
    try:
        checksums = read_checksums(folder)
    except ChecksumsUnreadableError as error:
        return [str(error)]
    if checksums is None:
        return []
    return [*checksums.damages(folder, sorted({*checksums.sha256, *_data_files(folder)}))]


def _text_of(folder: Path, damages: list[str]) -> str:
    lines = [f"the checkpoint {folder} is damaged: {_told(damages)}"]
    if re.fullmatch(r"step-\d+", folder.name):
        older = [
            path
            for path in step_folders(folder.parent)
            if is_complete(path) and step_of(path) != step_of(folder)
        ]
        intact = next((path for path in reversed(older) if not damages_of(path)), None)
        if intact is None:
            lines.append("  No other one there is intact: start anew in another --dump_folder")
        else:
            lines.append(
                f"  The newest intact one is {intact}: --checkpoint.load_step {step_of(intact)}"
            )
    return "\n".join(lines)


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
