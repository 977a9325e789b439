"""Balanced stages train, captured, eagerly and placed, and are resumed otherwise or as they were."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gt_autoparallel import tensors_of_parts

BALANCED = {"--parallelism.pipeline_parallel_balance": "simulated"}


def train(
    folder: Path, steps: int, flags: dict[str, str], *further: str
) -> tuple[list[float], str]:
    """Losses of a run of two ranks, and its log."""
    every = {
        "--nproc": "2",
        "--parallelism.pipeline_parallel_degree": "2",
        "--training.steps": str(steps),
        "--training.local_batch_size": "4",
        "--training.seq_len": "32",
        "--checkpoint.interval": "2",
        "--metrics.log_freq": "1",
        "--dump_folder": str(folder),
        **flags,
    }
    done = subprocess.run(
        [sys.executable, "-m", "gt_trainer", *itertools.chain(*every.items()), *further],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        env={**os.environ, "GT_DEVICE": "cpu", "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records], done.stdout + done.stderr


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], str]:
    folder = tmp_path_factory.mktemp("captured")
    return folder, *train(folder, 2, BALANCED)


def test_losses_are_those_of_the_eager_pipeline_with_the_same_stages(
    captured: tuple[Path, list[float], str], tmp_path: Path
):
    _, losses, log = captured
    assert "less than" in log.partition("Stages balanced by simulated time on H100 SXM: ")[2]
    assert "tok_embeddings, layers.0 to 3 (by layers " in log
    assert "layers.4, layers.5, norm, lm_head (by layers " in log
    eager, _ = train(
        tmp_path,
        2,
        {"--compile.mode": "none"},
        "--parallelism.module_fqns_per_model_part",
        "tok_embeddings,layers.0,layers.1,layers.2,layers.3",
        "layers.4,layers.5,norm,lm_head",
    )
    assert losses == eager
    assert len(losses) == 2


@pytest.mark.slow
def test_eager_stages_are_balanced_likewise(
    captured: tuple[Path, list[float], str], tmp_path: Path
):
    losses, log = train(tmp_path, 2, {**BALANCED, "--compile.mode": "none"})
    assert losses == captured[1]
    assert "tok_embeddings, layers.0 to 3 (by layers " in log


@pytest.mark.slow
def test_a_checkpoint_is_resumed_under_another_balance(
    captured: tuple[Path, list[float], str], tmp_path: Path
):
    folder, losses, _ = captured
    resumed, _ = train(folder, 4, {})
    straight, _ = train(tmp_path, 4, BALANCED)
    assert straight[:2] == losses
    assert resumed == straight


@pytest.mark.slow
def test_stages_of_placed_modules_are_found_once_and_kept_with_their_plans(tmp_path: Path):
    flags = {
        "--nproc": "4",
        "--parallelism.data_parallel_shard_degree": "2",
        "--parallelism.pipeline_parallel_balance": "planned",
    }
    losses, log = train(tmp_path / "run", 2, flags, "--compile.autoparallel")
    assert "Stages balanced by simulated time of placed modules on H100 SXM: " in log
    kept = tensors_of_parts(tmp_path / "run" / "checkpoint" / "placement.json")
    assert kept.keys() == {"stage 0", "stage 1"}
    resumed, log = train(tmp_path / "run", 4, flags, "--compile.autoparallel")
    assert "Stages balanced" not in log
    assert "Placement: the plans of " in log
    straight, _ = train(tmp_path / "straight", 4, flags, "--compile.autoparallel")
    assert straight[:2] == losses
    assert resumed == straight
