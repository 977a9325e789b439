"""A run that loses a rank goes on by itself, and ends where it would have ended."""

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


def _start(folder: Path) -> "subprocess.Popen[str]":
    flags = {
        "--nproc": "2",
        "--restarts": "2",
        "--parallelism.data_parallel_shard_degree": "2",
        "--compile.mode": "none",  # how a run goes on has nothing to do with capture
        "--training.steps": "6",
        "--training.local_batch_size": "1",
        "--training.seq_len": "64",
        "--checkpoint.interval": "1",
        "--dump_folder": str(folder),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "gt_trainer", *itertools.chain.from_iterable(flags.items())],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "GT_DEVICE": "cpu", "PYTHONWARNINGS": "ignore"},
    )


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert [line["step"] for line in lines] == list(range(1, 7))
    return {line["step"]: line["loss"] for line in lines}


@pytest.mark.slow  # three starts; gt-trainer restarts small programs
def test_a_run_whose_rank_is_killed_ends_bitwise_as_one_that_never_failed(tmp_path):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    process = _start(undisturbed)
    assert process.wait(timeout=600) == 0

    process = _start(killed)
    complete = killed / "checkpoint" / "step-3" / ".metadata"
    deadline = time.monotonic() + 600
    while not complete.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "no third checkpoint"
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGSTOP)  # it looks at nothing before the disk lost bytes, too
    for rank in _children(process.pid):
        os.kill(rank, signal.SIGKILL)
    newest = max(killed.glob("checkpoint/step-*/.metadata"), key=os.path.getmtime).parent
    damaged = newest / "__0_0.distcp"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    os.kill(process.pid, signal.SIGCONT)

    errors = process.communicate(timeout=600)[1]
    assert process.returncode == 0, errors
    assert "of 2 was killed by SIGKILL" in errors
    assert "gt-train: starting again, 1 of --restarts 2" in errors
    assert (
        f"{newest} is damaged (__0_0.distcp is not what was saved), and is now damaged-" in errors
    )
    assert _losses(killed) == _losses(undisturbed)
