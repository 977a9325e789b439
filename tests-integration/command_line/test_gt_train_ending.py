"""How a real training run of two processes ends when it is interrupted or loses a rank."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def start_training(folder: Path) -> tuple["subprocess.Popen[str]", list[int]]:
    """Start a run that would last for hours, and return when its first step is done."""
    flags = {
        "--nproc": "2",
        "--parallelism.data_parallel_shard_degree": "2",
        "--compile.mode": "none",  # how a run ends has nothing to do with capture
        "--training.steps": "100000",
        "--training.local_batch_size": "1",
        "--training.seq_len": "64",
        "--dump_folder": str(folder),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "gt_trainer", *itertools.chain.from_iterable(flags.items())],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "GT_DEVICE": "cpu", "PYTHONWARNINGS": "ignore"},
    )
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().strip()):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "no first step"
        time.sleep(0.1)
    ranks = children(process.pid)
    assert len(ranks) == 2
    return process, ranks


@pytest.mark.slow  # gt-trainer interrupts a launcher of small programs
def test_ctrl_c_ends_all_ranks_with_one_message(tmp_path):
    process, ranks = start_training(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert errors == (
        "gt-train: interrupted; all 2 ranks were ended\n"
        f"  nothing is left to go on from: no checkpoint is complete in {tmp_path / 'checkpoint'}\n"
    )
    assert not any(map(is_alive, ranks))
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()]
    assert steps == list(range(1, len(steps) + 1))


def test_a_killed_rank_ends_the_other_with_one_message(tmp_path):
    process, ranks = start_training(tmp_path)
    os.kill(ranks[1], signal.SIGKILL)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 128 + signal.SIGKILL
    assert errors.endswith(
        "gt-train: rank 1 of 2 was killed by SIGKILL (the kernel does this when memory runs out)\n"
        "  the other ranks were ended\n"
        f"  its output: {tmp_path / 'logs' / 'rank_1.log'}\n"
        f"  nothing is left to go on from: no checkpoint is complete in {tmp_path / 'checkpoint'}\n"
    )
    assert "Traceback" not in errors
    assert not any(map(is_alive, ranks))
