"""What a run keeps of each of its starts, for whoever looks at it later."""

from __future__ import annotations

import time
from pathlib import Path

from gt_trainer.metrics.metrics_history import MetricsHistory
from gt_trainer.run_files import STARTS_FILE


def record_start(folder: Path, *, step: int, facts: dict[str, object]) -> None:
    """Add this start to those before it; later ones, from which nothing is left, are dropped.

    Args:
        folder: the dump folder.
        step: the first that this start trains, from 1.
        facts: what was started, as values that JSON knows.

    Raises:
        MetricsFileError: the file cannot be written.
        MetricsHistoryError: it is not one of ours.
    """
    history = MetricsHistory(folder / STARTS_FILE)
    history.write({"step": step, "time": time.time(), **facts})
    history.close()
