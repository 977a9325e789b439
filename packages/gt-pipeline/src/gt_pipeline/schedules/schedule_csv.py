"""A schedule of one's own, from a CSV file, in the format that PyTorch's schedules read and write.

One row is a rank, one cell a compute action such as ``2F0`` or ``(2F1;3B0)OVERLAP_F_B``; empty
cells are bubbles, and mean nothing to a run. Which stages a rank holds follows from its row.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from gt_pipeline.errors import ActionError, ScheduleError
from gt_pipeline.schedules.actions import Action, parse_action
from gt_pipeline.schedules.schedule import Schedule
from gt_pipeline.schedules.schedule_checks import check_schedule


def schedule_from_csv(path: Path | str, *, name: str | None = None) -> Schedule:
    """Read a schedule, and check it. Its sizes are those of the actions that are in it.

    Args:
        path: of the file.
        name: of the schedule; else the file's, without its suffix.

    Raises:
        FileNotFoundError: no such file.
        ScheduleError: cells that are no compute action, by row and column, or a schedule that
            cannot run; lists every violation.
    """
    path = Path(path)
    problems: list[str] = []
    with path.open(newline="", encoding="utf-8") as file:
        compute = tuple(
            tuple(_actions_of(row, rank, problems)) for rank, row in enumerate(csv.reader(file))
        )
    holders: dict[int, int] = {}
    microbatches: set[int] = set()
    for rank, actions in enumerate(compute):
        for action in actions:
            for part in action.compute_parts:
                holders.setdefault(part.stage, rank)
                microbatches.add(part.microbatch or 0)
    if not problems and not holders:
        problems = ["it has no compute action"]
    elif not problems:
        absent = (stage for stage in range(max(holders)) if stage not in holders)
        problems = [f"stage {stage} has no action" for stage in absent]
    if problems:
        raise ScheduleError(what=f"{path} holds no schedule", problems=problems)
    schedule = Schedule(
        name=path.stem if name is None else name,
        num_microbatches=max(microbatches) + 1,
        stage_to_rank=tuple(holders[stage] for stage in range(len(holders))),
        compute=compute,
    )
    check_schedule(schedule)
    return schedule


def schedule_to_csv(schedule: Schedule, path: Path | str) -> None:
    """Write a schedule, so that ``schedule_from_csv`` and PyTorch can read it."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([str(each) for each in row] for row in schedule.compute)


def _actions_of(row: Sequence[str], rank: int, problems: list[str]) -> list[Action]:
    actions: list[Action] = []
    for column, cell in enumerate(row):
        if not cell.strip():
            continue
        where = f"row {rank + 1}, column {column + 1}"
        try:
            action = parse_action(cell)
        except ActionError as error:
            problems.append(f"{where}: {error.what}: {error.problems[0]}")
            continue
        if not action.is_compute:
            problems.append(f"{where}: {action} does not compute; leave it to lower")
            continue
        actions.append(action)
    return actions
