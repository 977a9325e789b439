"""Training as ``gt-train`` starts it, on a GPU: needs torchtitan, as nothing else here does."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu.sites import Site

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed here"
)

_NUM_STEPS = 5
_STEPS = ("--training.steps", str(_NUM_STEPS), "--training.seq_len", "256")
_CAPTURED = ("--compile.mode", "aot_fx_trace", "--compile.bitwise")


def losses_of(folder: Path, *flags: str, device: str) -> list[float]:
    """The losses of a short run of the Llama 3 debug model."""
    command = [sys.executable, "-m", "gt_trainer", *_STEPS, "--dump_folder", str(folder), *flags]
    environment = {**os.environ, "GT_DEVICE": device, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    finished = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


@pytest.mark.slow
def test_captured_training_is_eager_training_to_the_bit(site: Site, tmp_path: Path) -> None:
    device = site.device.type
    flags = ("--debug.deterministic", "--debug.seed", "1")
    eager = losses_of(tmp_path / "eager", "--compile.mode", "none", *flags, device=device)
    captured = losses_of(tmp_path / "captured", *_CAPTURED, *flags, device=device)
    assert len(eager) == _NUM_STEPS
    assert captured == eager


@pytest.mark.slow
def test_recorded_training_is_captured_training_to_the_bit(gpu: Site, tmp_path: Path) -> None:
    flags = (*_CAPTURED, "--debug.deterministic", "--debug.seed", "1")
    captured = losses_of(tmp_path / "captured", *flags, device="cuda")
    recorded = losses_of(tmp_path / "recorded", *flags, "--compile.cuda_graphs", device="cuda")
    assert recorded == captured


@pytest.mark.slow
def test_the_defaults_of_a_gpu_train(gpu: Site, tmp_path: Path) -> None:
    losses = losses_of(tmp_path / "defaults", device="cuda")
    assert len(losses) == _NUM_STEPS
    assert losses[-1] < losses[0]
