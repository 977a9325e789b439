"""Which plan a run trains with: the file it names, or the one kept beside what it goes on from.

A plan is searched for once. It is kept as ``placement.json`` beside the checkpoints that were made
with it, and a run that goes on from these has the same plan, however long a search would take now
and whatever it would find.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan.tools import filesystem

from gt_trainer.step_folders import newest_checkpoint

PLAN_FILE = "placement.json"
"""Name of the file with a plan: of a run in its dump folder, of checkpoints in theirs."""


def plan_file_of(config: Any) -> Path | None:
    """The file whose plan a run has to use; None if it searches for one, or places by hand.

    Args:
        config: a ``GraphTrainer.Config``.
    """
    if not config.compile.autoparallel:
        return None
    asked: str | None = config.compile.autoparallel_solver.plan
    if asked is not None:
        return Path(asked)
    folder = _local_folder(config)
    if folder is None or newest_checkpoint(folder) is None:
        return None
    kept = folder / PLAN_FILE
    return kept if kept.is_file() else None


def with_plan_file(options: Any, path: Path | None) -> Any:
    """The ``--compile`` options, with the file of a plan if there is one."""
    if path is None:
        return options
    solver = replace(options.autoparallel_solver, plan=str(path))
    return replace(options, autoparallel_solver=solver)


def keep_plan(config: Any, written: bytes) -> bool:
    """Keep the plan of a run beside its checkpoints.

    Whoever reads it there sees the old file or all of the new one.

    Args:
        config: a ``GraphTrainer.Config``.
        written: the file, as the run wrote it to its dump folder: another one may have since.

    Returns:
        False if it cannot be kept there: the checkpoints are remote.
    """
    folder = _local_folder(config)
    if folder is None:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f".{PLAN_FILE}.{os.getpid()}.tmp"
    try:
        scratch.write_bytes(written)
        scratch.replace(folder / PLAN_FILE)
    finally:
        scratch.unlink(missing_ok=True)
    return True


def _local_folder(config: Any) -> Path | None:
    """The folder of checkpoints; None if there is none, or none on this machine's disks."""
    folder = filesystem.join(config.dump_folder, config.checkpoint.folder)
    if not config.checkpoint.enable or filesystem.is_remote(folder):
        return None
    return Path(folder)
