"""Models of transformers train captured as they do eagerly, from and to folders of theirs."""

from __future__ import annotations

import json
import os
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


def test_weights_in_several_files_are_read_in_every_bit(two: GlooWorkers, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "llama", max_shard_size="400KB")
    assert len([*folder.glob("*.safetensors")]) == 3
    case = FolderCase(folder=str(folder), parallelism=FSDP)
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


def train(folder: Path, run: Path, *flags: str, num_ranks: int = 1) -> list[float]:
    """The losses of two steps by the command line."""
    options = f"--steps 2 --seq-len 64 --nproc {num_ranks} --dump_folder {run}"
    options += f" --parallelism.data_parallel_shard_degree {num_ranks}"
    command = [sys.executable, "-m", "gt_trainer", "--module", f"hf:{folder}", *options.split()]
    subprocess.run([*command, *flags], check=True, timeout=300)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 2
    return losses


@pytest.mark.slow
def test_a_folder_is_trained_from_the_command_line(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "llama")
    captured, eager = (
        train(folder, tmp_path / mode, "--compile.mode", mode, num_ranks=2)
        for mode in ("aot_fx_trace", "none")
    )
    assert captured == eager


@pytest.mark.slow
def test_a_folder_of_several_files_starts_from_stored_graphs_and_is_validated(
    tmp_path: Path,
) -> None:
    folder = make_folder(tmp_path, "llama", max_shard_size="400KB")
    stored = ("--compile.artifacts", str(tmp_path / "graphs"))
    cold = train(folder, tmp_path / "cold", *stored)
    validation = ("--validator.enable", "--validator.freq", "1")
    warm = train(folder, tmp_path / "warm", *stored, *validation)
    assert warm == cold
    captures = [
        json.loads((tmp_path / run / "captures.json").read_text()) for run in ("cold", "warm")
    ]
    assert [each["captured"].partition(" ")[0] for (each,) in captures] == ["Captured", "Loaded"]
    validated = (tmp_path / "warm" / "validation.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in validated] == [1, 2]


@pytest.mark.slow
def test_weights_are_drawn_where_those_of_the_folder_are_not_wanted(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "llama")
    read = train(folder, tmp_path / "read")
    drawn = train(folder, tmp_path / "drawn", "--checkpoint.no_initial_load_in_hf")
    assert drawn[0] != read[0]
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert train(folder, tmp_path / "without") == drawn


SAME_IN_EACH_PROCESS = """
import sys
from pathlib import Path
from gt_trainer.artifacts.run_identity import attribute_texts
from gt_trainer.models.hugging_face.causal_model import CausalModel
for config in map(Path, sys.argv[1:]):
    text = config.read_text()
    model = CausalModel(CausalModel.Config(config_json=text, vocab_size=2048, max_seq_len=256))
    print(sorted(attribute_texts(model, leave_out=frozenset({"param_init"}), meta_device="cpu")))
"""


def test_what_identifies_a_graph_of_a_model_is_the_same_in_each_process(tmp_path: Path) -> None:
    configs = [str(make_folder(tmp_path, family) / "config.json") for family in CONFIGS]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SAME_IN_EACH_PROCESS, *configs],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (process.communicate(timeout=300)[0] for process in processes)
    assert len(first.splitlines()) == len(CONFIGS)
    assert first == second
