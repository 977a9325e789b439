"""The folders step-N of a run, as torchtitan's checkpointer names them: which, and which are whole.

Also read before a run starts and while a model is placed, so that nothing here loads a checkpoint.
"""

from __future__ import annotations

import re
from pathlib import Path

METADATA = ".metadata"
"""The file that ends a save of PyTorch's form."""

HF_INDEX = "model.safetensors.index.json"
"""The file that ends a save of Hugging Face's form."""

SHARDED = "sharded"
"""The folder in which ranks put their parts of a save of Hugging Face's form."""

_STEP_FOLDER = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_LIKE_STEP_FOLDER = re.compile(r"\s*step-[+-]?\d+\s*", re.IGNORECASE)


def step_folders(folder: Path) -> list[Path]:
    """Return the folders step-N in ``folder`` by step, saves that were cut off included."""
    if not folder.is_dir():
        return []
    steps = [path for path in folder.iterdir() if path.is_dir() and is_named_by_step(path)]
    return sorted(steps, key=step_of)


def is_named_by_step(path: Path) -> bool:
    """Whether a folder is named step-N as a run names it: no zeros in front, and ASCII digits."""
    return _STEP_FOLDER.fullmatch(path.name) is not None


def misnamed_step_folders(folder: Path) -> list[Path]:
    """Return folders whose names people read as step-N, but a run would not."""
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_dir() and _LIKE_STEP_FOLDER.fullmatch(path.name) and not is_named_by_step(path)
    )


def is_complete(path: Path) -> bool:
    """Whether a save of either form came to its end."""
    return has_metadata(path) or (path / HF_INDEX).is_file()


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint of the highest step in ``folder``, if there is one."""
    complete = [path for path in step_folders(folder) if is_complete(path)]
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


def has_metadata(path: Path) -> bool:
    """Whether a save of PyTorch's form came to its end; one of Hugging Face's has none."""
    return (path / METADATA).is_file()
