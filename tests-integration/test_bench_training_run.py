"""The benchmark of a training run, on a CPU: each contestant trains, and a second run continues."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmarks" / "bench_training_run.py"
_SMALL = ["--steps=4", "--warm=2", "--batch=2", "--seq=16", "--dim=32", "--layers=2", "--vocab=300"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), *_SMALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.slow  # six processes that import transformers
def test_contestants_train_alike_and_a_second_run_continues(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    first = run("--device=cpu", f"--json={path}", "--only=eager")
    assert first.returncode == 0, first.stderr
    written = {each.name: each.stat().st_mtime_ns for each in tmp_path.glob("run-*.json")}
    assert set(written) == {"run-eager.json", "run-eager-other-order-of-batches.json"}
    second = run("--device=cpu", f"--json={path}")
    assert second.returncode == 0, second.stderr
    assert (
        written.items()
        <= {each.name: each.stat().st_mtime_ns for each in tmp_path.glob("run-*.json")}.items()
    )
    rows = json.loads(path.read_text())["rows"]
    differences = {
        row["workload"]: row["ours"]
        for row in rows
        if row["metric"] == "largest_difference_from_eager"
    }
    other = differences.pop("eager, other order of batches")
    assert set(differences) == {
        "eager",
        "torch.compile",
        "ours, full, graphs",
        "ours, regional, graphs",
    }
    assert set(differences.values()) == {0.0}
    assert other > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_machine_without_a_gpu_is_told() -> None:
    refused = run("--json=unused.json")
    assert refused.returncode == 2
    assert refused.stderr.endswith(
        "bench_training_run: needs a CUDA device, and this machine has none\n"
    )


@pytest.mark.slow
def test_a_contestant_that_fails_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    refused = run("--device=cpu", f"--json={path}", "--only=torch.compile", "--vocab=3")
    assert refused.returncode == 1
    assert json.loads(path.read_text())["notes"][1].startswith("torch.compile: failed: ")
