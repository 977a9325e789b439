"""The main job, as a stranger runs it: ``gt-train`` without arguments, in a process of its own."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

DUMP_FOLDER = "outputs/llama3_debugmodel"


def gt_train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gt_trainer", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "GT_DEVICE": "cpu"},
    )


def read_metrics(folder: Path) -> list[dict[str, float]]:
    lines = (folder / DUMP_FOLDER / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_main_job_captures_trains_and_resumes(tmp_path: Path) -> None:
    first = gt_train(tmp_path)
    assert first.returncode == 0, first.stderr
    assert "Captured the training step" in first.stderr + first.stdout
    metrics = read_metrics(tmp_path)
    assert [m["step"] for m in metrics] == list(range(1, 21))
    # Single batches differ; the mean of the last five says where the loss is.
    final = statistics.mean(m["loss"] for m in metrics[-5:])
    assert final < 0.8 * metrics[0]["loss"]
    assert (tmp_path / DUMP_FOLDER / "checkpoint/step-20/.metadata").exists()
    parts = json.loads((tmp_path / DUMP_FOLDER / "startup.json").read_text())
    named = {"imports", "setup", "capture", "passes", "execution", "total"}
    assert set(parts) == named | {f"cpu_{name}" for name in named}
    for prefix in ("", "cpu_"):
        of_whole = sum(parts[prefix + name] for name in named - {"total"})
        assert abs(of_whole - parts[f"{prefix}total"]) < 1e-3

    again = gt_train(tmp_path)
    assert again.returncode == 0
    assert again.stderr.endswith(
        f"gt-train: nothing to do: {DUMP_FOLDER}/checkpoint/step-20 is of step 20, and "
        "--training.steps is 20.\n"
        "  To train on:    --training.steps 40\n"
        "  To start anew:  --dump_folder with a folder that holds no checkpoint\n"
    )

    more = gt_train(tmp_path, "--training.steps", "22")
    assert more.returncode == 0, more.stderr
    assert read_metrics(tmp_path)[:20] == metrics
    assert [m["step"] for m in read_metrics(tmp_path)][20:] == [21, 22]
