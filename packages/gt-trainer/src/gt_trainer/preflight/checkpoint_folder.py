"""Judge the checkpoints that a run would resume from, before it starts.

torchtitan resumes from the newest step folder that holds a ``.metadata`` file, and passes over all
others without a word (``torchtitan/components/checkpointer/dcp.py``, ``_find_load_step``). A folder
without that file is a save that was cut off. If an older complete one exists, resuming from it is
right, and worth a warning; if none does, training would silently start over in the same folder, and
that is refused. A complete checkpoint whose files are missing or short would fail on some rank,
deep in the load; it is refused here.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.tools import filesystem

from gt_config import Violation

_STEP_FOLDER = re.compile(r"step-(\d+)")
_METADATA = ".metadata"
_HF_INDEX = "model.safetensors.index.json"


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint of the highest step in ``folder``, if there is one."""
    complete = [path for path in _step_folders(folder) if _is_complete(path)]
    return complete[-1] if complete else None


def step_of(checkpoint: Path) -> int:
    """Return the step that a checkpoint's folder is named after.

    Raises:
        ValueError: The folder is not named step-N.
    """
    match = _STEP_FOLDER.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint} is not named step-N")
    return int(match.group(1))


def check_checkpoints(
    checkpoint: BaseCheckpointManager.Config, dump_folder: Path
) -> Iterator[Violation]:
    """Yield what is wrong with the checkpoint that the run would load; remote ones are not read.

    Args:
        checkpoint: The ``--checkpoint.`` flags.
        dump_folder: The run's folder, in which the checkpoint folder is.
    """
    initial = checkpoint.initial_load_path
    if filesystem.is_remote(str(dump_folder)) or filesystem.is_remote(checkpoint.folder):
        return
    folder = dump_folder / checkpoint.folder
    steps = _step_folders(folder)
    if checkpoint.load_step != -1:
        yield from _check_asked_for(folder / f"step-{checkpoint.load_step}", checkpoint, steps)
        return
    if not steps:
        if initial is not None and not filesystem.is_remote(initial) and not Path(initial).is_dir():
            yield Violation(
                flag="--checkpoint.initial_load_path",
                value=initial,
                allowed="the folder of a checkpoint",
                fix="give an existing folder",
            )
        return
    newest = newest_checkpoint(folder)
    incomplete = [path.name for path in steps if not _is_complete(path)]
    if newest is None:
        yield Violation(
            flag="--checkpoint.folder",
            value=str(folder),
            allowed="complete checkpoints, or none",
            fix=(
                f"{', '.join(incomplete)} cut off while being saved (no {_METADATA}): delete "
                "to start over, or choose another --dump_folder"
            ),
        )
        return
    if incomplete:
        warnings.warn(
            f"{', '.join(incomplete)} in {folder} cut off while being saved (no {_METADATA}); "
            f"resuming from {newest.name}",
            stacklevel=2,
        )
    yield from _check_complete(newest)


def _check_asked_for(
    path: Path, checkpoint: BaseCheckpointManager.Config, steps: list[Path]
) -> Iterator[Violation]:
    if path.is_dir() and _is_complete(path):
        yield from _check_complete(path)
        return
    known = [str(_step_of(step)) for step in steps if _is_complete(step)]
    yield Violation(
        flag="--checkpoint.load_step",
        value=checkpoint.load_step,
        allowed=f"a step saved in {path.parent}: {', '.join(known) or 'there is none'}",
        fix="choose one of these, or leave the flag out for the newest",
    )


def _check_complete(path: Path) -> Iterator[Violation]:
    """Yield at most one violation: what is damaged in a folder that looks complete."""
    damage = _damage(path)
    if damage is not None:
        yield Violation(
            flag="--checkpoint.folder",
            value=str(path),
            allowed="an intact checkpoint",
            fix=(
                f"{damage}: delete this folder to resume from an older one, or choose another "
                "--dump_folder"
            ),
        )


def _damage(path: Path) -> str | None:
    if not (path / _METADATA).is_file():
        return None  # Hugging Face's format, which its own reader checks
    try:
        storage = FileSystemReader(path).read_metadata().storage_data
    except Exception as error:  # noqa: BLE001  # unpickling damaged bytes can raise anything
        return f"{_METADATA} cannot be read ({type(error).__name__})"
    needed: dict[str, int] = {}
    for item in (storage or {}).values():
        end = item.offset + item.length
        needed[item.relative_path] = max(end, needed.get(item.relative_path, 0))
    for name, size_bytes in sorted(needed.items()):
        if not (path / name).is_file():
            return f"{name} is missing"
        found = (path / name).stat().st_size
        if found < size_bytes:
            return f"{name} has {found} bytes of at least {size_bytes}"
    return None


def _is_complete(path: Path) -> bool:
    return (path / _METADATA).is_file() or (path / _HF_INDEX).is_file()


def _step_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    steps = [
        path for path in folder.iterdir() if path.is_dir() and _STEP_FOLDER.fullmatch(path.name)
    ]
    return sorted(steps, key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
