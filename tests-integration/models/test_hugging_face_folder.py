"""Models of transformers train captured as they do eagerly, from and to folders of theirs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from models.hugging_face_cases import CONFIGS, FolderCase, logits, make_folder, read_and_export
from training_cases import NUM_STEPS, NUM_UNSEEN_BATCHES, compare_modes

from gt_trace.testing import GlooWorkers

FSDP = {"data_parallel_shard_degree": 2}
REPLICAS = {"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": 2}


@pytest.mark.parametrize(
    ("family", "parallelism"),
    [
        ("llama", FSDP),
        ("qwen2", FSDP),
        ("gpt2", FSDP),
        ("llama", REPLICAS),
    ],
)
def test_captured_equals_eager_on_two_ranks(
    family: str, parallelism: dict[str, int], two: GlooWorkers, tmp_path: Path
) -> None:
    case = FolderCase(folder=str(make_folder(tmp_path, family)), parallelism=parallelism)
    for found in two.run(compare_modes, case, str(tmp_path)):
        assert found.differences == ()
        assert len(found.losses) == NUM_STEPS + NUM_UNSEEN_BATCHES
        assert len(set(found.losses)) > NUM_STEPS
        assert found.without_gradient == ()
        assert found.num_captures == 1
        assert found.verified


@pytest.mark.parametrize("family", CONFIGS)
def test_weights_are_read_and_exported_in_every_bit(
    family: str, two: GlooWorkers, tmp_path: Path
) -> None:
    case = FolderCase(folder=str(make_folder(tmp_path, family)), parallelism=FSDP)
    for misread, miswritten, num_changed in two.run(read_and_export, case, str(tmp_path / "run")):
        assert misread == []
        assert miswritten == []
        assert num_changed > 0


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_those_of_transformers_and_of_each_document_alone(
    family: str, one: GlooWorkers, tmp_path: Path
) -> None:
    case = FolderCase(folder=str(make_folder(tmp_path, family)))
    assert one.run(logits, case, str(tmp_path / "run")) == [(True, True)]


@pytest.mark.slow
def test_a_folder_is_trained_from_the_command_line(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "llama")
    losses = []
    for mode in ("aot_fx_trace", "none"):
        run = tmp_path / mode
        flags = f"--steps 2 --seq-len 64 --nproc 2 --compile.mode {mode} --dump_folder {run}"
        flags += " --parallelism.data_parallel_shard_degree 2"
        subprocess.run(
            [sys.executable, "-m", "gt_trainer", "--module", f"hf:{folder}", *flags.split()],
            check=True,
            timeout=300,
        )
        lines = (run / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]
