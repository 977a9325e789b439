"""The programs in examples/ run as their first lines say, and need neither gt-trainer nor torchtitan.

Pipelines run on four processes, with captured graphs and, marked slow, with PyTorch's runtime too. The
placed model's loop runs on two ranks whose imports are shared and, marked slow, as a program on four.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from example_cases import EXAMPLES, losses_of_placed_example

from gt_trace.testing import GlooWorkers

ALLOWED = {"torch", "transformers", "gt_autoparallel", "gt_pipeline", *sys.stdlib_module_names}


def run_example(name: str, *options: str, search_path: Path | None = None) -> str:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    finished = subprocess.run(
        [sys.executable, *launch, str(EXAMPLES / name), *options],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(search_path or "")},
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


# With both runtimes in one run; by default the graphs alone.
RUNTIMES = [("graph",), pytest.param(("eager", "graph"), marks=pytest.mark.slow)]


@pytest.mark.parametrize("runtimes", RUNTIMES)
def test_plain_pytorch_trains_to_the_bits_of_one_process(runtimes: tuple[str, ...], tmp_path: Path):
    # What its first lines install brings torch, and torch no NumPy.
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('NumPy')\n")
    options = ("--runtimes", *runtimes, "--schedule", "DualPipeV")
    printed = run_example("plain_pytorch.py", *options, search_path=tmp_path)
    for runtime in runtimes:
        losses = re.findall(rf"{runtime}: step \d+: loss (\S+)", printed)
        assert len(losses) == 10
        assert float(losses[-1]) < float(losses[0]) / 2
        claim = "every loss is that of training without a pipeline, to the bit"
        assert re.findall(rf"{runtime}: {claim}: (\w+)", printed) == ["True"]


@pytest.mark.parametrize("runtimes", RUNTIMES)
def test_a_hugging_face_llama_has_the_gradients_of_one_process(runtimes: tuple[str, ...]):
    printed = run_example("hugging_face_llama.py", "--runtimes", *runtimes, "--steps", "2")
    for runtime in runtimes:
        assert len(re.findall(rf"{runtime}: step \d+: loss", printed)) == 2
        claim = "gradients are those of training without a pipeline, to the bit"
        # Nine in each of six layers; embedding, norm and head.
        assert re.findall(rf"{runtime}: (\d+) {claim}: (\w+)", printed) == [("57", "True")]


@pytest.mark.slow
def test_a_placed_hugging_face_model_has_the_losses_of_one_process():
    printed = run_example("placed_hugging_face.py")
    assert len(re.findall(r"step \d: loss", printed)) == 5
    (error,) = re.findall(r"largest relative difference from one process: (\S+)", printed)
    assert float(error) < 1e-5


def test_the_loop_of_the_placed_model_has_the_losses_of_one_process_on_two_ranks():
    preload = ["gt_autoparallel", "transformers.models.bert.modeling_bert"]
    with GlooWorkers(2, timeout=500, preload=preload) as workers:
        for placed, alone in workers.run(losses_of_placed_example):
            assert len(placed) == 5
            assert placed == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_they_import_torch_transformers_and_one_of_the_packages_alone(path: Path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= ALLOWED
    assert not {"gt_autoparallel", "gt_pipeline"} <= imported


def test_every_example_is_in_the_readme_of_the_folder():
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert {path.name for path in EXAMPLES.glob("*.py") if f"({path.name})" not in readme} == set()
