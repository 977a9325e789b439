"""Training that is killed at any moment goes on as if it had not been, with nothing lost or twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NUM_KILLS = 100


@pytest.mark.slow  # a start for each kill
def test_runs_that_are_killed_at_random_moments_end_bitwise_as_one_that_never_was(
    tmp_path: Path,
) -> None:
    own = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "command_line.kill_cases", str(tmp_path), str(NUM_KILLS), "0"],
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
        env={
            **os.environ,
            "GT_DEVICE": "cpu",
            "PYTHONPATH": os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH")))),
        },
    )
    assert done.returncode == 0, done.stderr[-4000:]
    counts = json.loads(done.stdout)
    assert counts["kills"] == NUM_KILLS
    assert counts["runs"] > 0
    assert counts["while saving"] > 0
