"""The launch scripts: one pair for each published size, for exactly its number of ranks."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser
from torch.numa.binding import AffinityMode

from gt_trainer.models.catalog import CATALOG

LAUNCH = Path(__file__).parents[1] / "launch"
PUBLISHED = [
    entry
    for table in CATALOG.values()
    for entry in table.values()
    if "debugmodel" not in entry.config
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


def test_the_scripts_are_those_of_the_generator():
    from launch_scripts import shipped_scripts

    for name, text in shipped_scripts().items():
        assert (LAUNCH / name).read_text() == text, "run tools/launch_scripts.py"


@every_size
def test_the_slurm_script_starts_the_intended_ranks(entry):
    text = (LAUNCH / f"{entry.config}.sbatch").read_text()
    nodes = int(re.search(r"--nodes=(\d+)", text)[1])
    tasks = int(re.search(r"--ntasks-per-node=(\d+)", text)[1])
    assert nodes * tasks == entry.world_size
    assert f" gt-train --module {entry.module} --config {entry.config} " in text
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


@every_size
def test_the_torchrun_script_has_options_that_torchrun_knows(entry, tmp_path):
    started = start(f"{entry.config}.torchrun.sh", tmp_path)
    options = get_args_parser().parse_args(started.arguments)
    assert options.numa_binding in [mode.value for mode in AffinityMode]
    assert options.training_script == "gt_trainer"
    assert options.training_script_args[-2:] == ["--training.steps", "7"]


@every_size
def test_each_rank_of_the_slurm_script_has_the_cores_of_its_gpus_numa_node(entry, tmp_path):
    text = (LAUNCH / f"{entry.config}.sbatch").read_text()
    cores = re.search(r"#SBATCH --cpus-per-task=(\d+)", text)[1]
    tasks = int(re.search(r"--ntasks-per-node=(\d+)", text)[1])
    started = start(f"{entry.config}.sbatch", tmp_path)
    # srun does not take over what sbatch was told.
    assert started.arguments[0] == f"--cpus-per-task={cores}"
    nodes = started.arguments[1].removeprefix("--cpu-bind=map_ldom:").split(",")
    assert nodes == ["0"] * (tasks // 2) + ["1"] * (tasks // 2)
    assert started.arguments[2:4] == ["gt-train", "--module"]
    assert started.arguments[-2:] == ["--training.steps", "7"]
    assert started.environment["OMP_NUM_THREADS"] == cores


@pytest.mark.parametrize("path", sorted(LAUNCH.glob("*.s*")), ids=lambda path: path.name)
def test_memory_does_not_fragment_and_networks_are_left_to_the_user(path, tmp_path):
    environment = start(path.name, tmp_path).environment
    assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert not {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} & environment.keys()


@pytest.mark.parametrize("name", ["llama3_8b.sbatch", "llama3_8b.torchrun.sh"])
def test_what_the_user_sets_is_kept(name, tmp_path):
    chosen = {
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:512",
        "OMP_NUM_THREADS": "3",
        "NCCL_SOCKET_IFNAME": "eth7",
        "CPU_BIND": "none",
        "NUMA_BINDING": "socket",
    }
    started = start(name, tmp_path, **chosen)
    assert {name: started.environment[name] for name in chosen} == chosen
    bound = {"--cpu-bind=none", "socket"} & set(started.arguments)
    assert len(bound) == 1


def test_the_readme_names_every_variable_that_the_scripts_read():
    scripts = "".join(path.read_text() for path in LAUNCH.glob("*.s*"))
    readme = (LAUNCH / "README.md").read_text()
    read = set(re.findall(r"\$\{([A-Z_]+):", scripts))
    assert {name for name in read if f"`{name}`" not in readme} == set()


@dataclass(frozen=True, kw_only=True)
class Started:
    """What a script would have started: arguments of srun or torchrun, and their environment."""

    arguments: list[str]
    environment: dict[str, str]


def start(name, folder, **environment):
    """Run a script with an srun and a torchrun that write down how they were started."""
    log = folder / "started.json"
    for program in ("srun", "torchrun"):
        stub = folder / program
        stub.write_text(
            f"#!{sys.executable}\nimport json, os, sys\n"
            f"json.dump([sys.argv[1:], dict(os.environ)], open({str(log)!r}, 'w'))\n"
        )
        stub.chmod(0o755)
    subprocess.run(
        ["bash", LAUNCH / name, "--training.steps", "7"],
        env={
            "PATH": f"{folder}:{os.environ['PATH']}",
            "HF_ASSETS_PATH": str(folder),
            "RDZV_ENDPOINT": "node1:29400",
            **environment,
        },
        check=True,
    )
    arguments, seen = json.loads(log.read_text())
    return Started(arguments=arguments, environment=seen)


def assert_that_comments_agree(text, entry):
    """The first comment repeats the catalog's degrees."""
    degrees = entry.description.rpartition(": ")[2].removesuffix(".")
    assert f"on {entry.world_size} H100: {degrees}." in text.splitlines()[1]
