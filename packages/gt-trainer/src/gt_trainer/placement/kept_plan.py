"""Which plan a run trains with: the file it names, or the one kept beside what it goes on from.

A plan is searched for once. It is kept as ``placement.json`` beside the checkpoints that were made
with it, and a run that goes on from these has the same plan, however long a search would take now
and whatever it would find. Where a pipeline was judged to be faster by hand, that judgement is kept
instead, as ``placed_by_hand.json``.
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

BY_HAND_FILE = "placed_by_hand.json"
"""Name of the file beside checkpoints that says why a pipeline's have no plan."""

JUDGEMENT_FILE = "pipeline_judgement.json"
"""Name of the file in the dump folder that says which step of a pipeline a dry run found to be
faster, for a start that would not have the time."""


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
    return _kept(config, PLAN_FILE)


def may_take_by_hand(config: Any) -> bool:
    """Whether a run's options leave it to be judged, or to have been, which step a pipeline takes.

    All ranks answer alike, whatever files they see.

    Args:
        config: a ``GraphTrainer.Config``.
    """
    options = config.compile
    solver = options.autoparallel_solver
    is_pipelined = config.parallelism.pipeline_parallel_degree > 1
    return bool(
        options.autoparallel and is_pipelined and solver.simulate_rivals and solver.plan is None
    )


def is_judged(config: Any) -> bool:
    """Whether a pipeline takes its plan or the step by hand, and no plan was kept.

    Args:
        config: a ``GraphTrainer.Config``.
    """
    return may_take_by_hand(config) and plan_file_of(config) is None


def by_hand_file_of(config: Any) -> Path | None:
    """The file that says why a run goes on by hand; None if it does not, or is yet to be judged.

    Args:
        config: a ``GraphTrainer.Config``.
    """
    return _kept(config, BY_HAND_FILE) if is_judged(config) else None


def with_plan_file(options: Any, path: Path | None) -> Any:
    """The ``--compile`` options, with the file of a plan if there is one."""
    if path is None:
        return options
    solver = replace(options.autoparallel_solver, plan=str(path))
    return replace(options, autoparallel_solver=solver)


def keep_plan(config: Any, written: bytes, *, name: str = PLAN_FILE) -> bool:
    """Keep beside a run's checkpoints the plan that it trains with, or why it has none.

    Whoever reads it there sees the old file or all of the new one. The file of the other kind goes
    after that: who reads between sees both, and takes the plan.

    Args:
        config: a ``GraphTrainer.Config``.
        written: the file, as the run wrote it to its dump folder: another one may have since.
        name: ``PLAN_FILE`` or ``BY_HAND_FILE``.

    Returns:
        False if it cannot be kept there: the checkpoints are remote.
    """
    folder = _local_folder(config)
    if folder is None:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f".{name}.{os.getpid()}.tmp"
    try:
        scratch.write_bytes(written)
        scratch.replace(folder / name)
    finally:
        scratch.unlink(missing_ok=True)
    for other in {PLAN_FILE, BY_HAND_FILE} - {name}:
        (folder / other).unlink(missing_ok=True)
    return True


def _kept(config: Any, name: str) -> Path | None:
    """A file beside the checkpoints that a run goes on from; None if there is none."""
    folder = _local_folder(config)
    if folder is None or newest_checkpoint(folder) is None:
        return None
    kept = folder / name
    return kept if kept.is_file() else None


def _local_folder(config: Any) -> Path | None:
    """The folder of checkpoints; None if there is none, or none on this machine's disks."""
    folder = filesystem.join(config.dump_folder, config.checkpoint.folder)
    if not config.checkpoint.enable or filesystem.is_remote(folder):
        return None
    return Path(folder)
