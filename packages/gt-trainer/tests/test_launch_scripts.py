"""The launch scripts: one pair for each published size, for exactly its number of ranks."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from gt_trainer.models.catalog import CATALOG

LAUNCH = Path(__file__).parents[1] / "launch"
PUBLISHED = [
    entry
    for table in CATALOG.values()
    for entry in table.values()
    if not entry.config.endswith("debugmodel")
]
every_size = pytest.mark.parametrize("entry", PUBLISHED, ids=lambda entry: entry.config)

pytestmark = pytest.mark.skipif(
    not LAUNCH.is_dir(), reason="the scripts are part of the repository, not of the wheel"
)


def test_there_is_a_pair_for_each_published_size_and_no_other():
    expected = {
        f"{entry.config}{suffix}" for entry in PUBLISHED for suffix in (".sbatch", ".torchrun.sh")
    }
    assert {path.name for path in LAUNCH.iterdir()} == expected | {"README.md"}


@every_size
def test_the_slurm_script_starts_the_intended_ranks(entry):
    text = (LAUNCH / f"{entry.config}.sbatch").read_text()
    nodes = int(re.search(r"--nodes=(\d+)", text)[1])
    tasks = int(re.search(r"--ntasks-per-node=(\d+)", text)[1])
    assert nodes * tasks == entry.world_size
    assert f"srun gt-train --module {entry.module} --config {entry.config} " in text
    assert_that_comments_agree(text, entry)


@every_size
def test_the_torchrun_script_starts_the_intended_ranks(entry):
    text = (LAUNCH / f"{entry.config}.torchrun.sh").read_text()
    nodes = int(re.search(r"--nnodes (\d+)", text)[1])
    processes = int(re.search(r"--nproc-per-node (\d+)", text)[1])
    assert nodes * processes == entry.world_size
    assert f"-m gt_trainer --module {entry.module} --config {entry.config} " in text
    assert_that_comments_agree(text, entry)


@pytest.mark.parametrize("path", sorted(LAUNCH.glob("*.s*")), ids=lambda path: path.name)
def test_a_script_is_valid_shell_and_asks_for_its_tokenizer(path):
    subprocess.run(["bash", "-n", path], check=True)
    environment = {key: value for key, value in os.environ.items() if key != "HF_ASSETS_PATH"}
    run = subprocess.run(
        ["bash", path], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode != 0
    assert "HF_ASSETS_PATH: folder with the tokenizer" in run.stderr


def assert_that_comments_agree(text, entry):
    """The first comment repeats the catalog's degrees."""
    degrees = entry.description.rpartition(": ")[2].removesuffix(".")
    assert f"on {entry.world_size} H100: {degrees}." in text.splitlines()[1]
