"""Training that is killed at any moment goes on as if it had not been, with nothing lost or twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line.kill_cases import TARGETS


@pytest.mark.slow  # a start for each kill
@pytest.mark.parametrize(("num_kills", "num_ranks"), [(100, 1), (15, 4)])
def test_runs_that_are_killed_at_random_moments_end_bitwise_as_one_that_never_was(
    tmp_path: Path, num_kills: int, num_ranks: int
) -> None:
    own = str(Path(__file__).parents[1])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "command_line.kill_cases", str(tmp_path)),
            *(str(num_kills), "0", str(num_ranks)),
        ],
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
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["kills"] == num_kills
    assert counts["runs"] > 0
    assert counts["set-up"] > 0
    assert counts["planning"] + counts["writing"] + counts["publishing"] > 0
    assert num_ranks == 1 or all(counts[target] > 0 for target in TARGETS)
