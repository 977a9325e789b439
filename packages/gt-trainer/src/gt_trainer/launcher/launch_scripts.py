"""Scripts that start a run on the nodes of a cluster, for Slurm and for torchrun. No torch."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

_CORES_OF_A_RANK = 12
_NUMA_NODES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRun:
    """What is started, and on how many nodes."""

    name: str
    """Of the job and, with a suffix, of its scripts."""

    what: str
    """The run in a few words, with its number of GPUs and its degrees."""

    model: str
    """Whose tokenizer the run needs."""

    num_nodes: int
    gpus_per_node: int
    hosts_per_domain: int = 1
    """Nodes that one NVLink domain connects, which have to be next to one another."""

    arguments: Sequence[str]
    """Of gt-train, as typed, but for the two that follow."""

    hf_assets_path: str | None = None
    """The tokenizer's folder, unless HF_ASSETS_PATH is set; None asks for that."""

    dump_folder: str | None = None
    """Unless DUMP_FOLDER is set; None for one of the run's name."""


def launch_scripts(run: ClusterRun) -> dict[str, str]:
    """The scripts' texts, by file name: ``NAME.sbatch`` and ``NAME.torchrun.sh``.

    Ranks are numbered node by node, so that ranks next to one another share a node. Variables
    that the scripts read are those of ``launch/README.md``.
    """
    return {
        f"{run.name}.sbatch": "\n".join([*_head(run, slurm=True), *_slurm(run)]) + "\n",
        f"{run.name}.torchrun.sh": "\n".join([*_head(run, slurm=False), *_torchrun(run)]) + "\n",
    }


def _head(run: ClusterRun, *, slurm: bool) -> list[str]:
    on_each = "the node" if run.num_nodes == 1 else f"each of the {run.num_nodes} nodes"
    endpoint = "RDZV_ENDPOINT=host:port " if run.num_nodes > 1 else ""
    started = f"sbatch {run.name}.sbatch" if slurm else f"{endpoint}./{run.name}.torchrun.sh"
    lines = [
        "#!/bin/bash",
        f"# {run.what}." + ("" if slurm else f" Start it on {on_each}:"),
        f"# HF_ASSETS_PATH=... {started} [more options of gt-train]",
        "# Never run on such a machine by its authors; gt-trainer/launch/README.md explains it.",
    ]
    if slurm:
        lines += [
            f"#SBATCH --job-name={run.name}",
            f"#SBATCH --nodes={run.num_nodes}",
            f"#SBATCH --ntasks-per-node={run.gpus_per_node}",
            f"#SBATCH --gpus-per-node={run.gpus_per_node}",
            f"#SBATCH --cpus-per-task={_CORES_OF_A_RANK}",
            "#SBATCH --exclusive",
        ]
        if run.hosts_per_domain > 1:
            segment = math.gcd(run.num_nodes, run.hosts_per_domain)
            lines.append(f"#SBATCH --segment={segment}")
    elif run.hosts_per_domain > 1:
        lines.append(
            f"# torchrun numbers nodes as they come: start those of an NVLink domain "
            f"({run.hosts_per_domain}) with --node-rank in their order."
        )
    return [
        *lines,
        "set -euo pipefail",
        *_defaults(run),
        'export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"',
        f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{_CORES_OF_A_RANK}}}"',
        "",
    ]


def _defaults(run: ClusterRun) -> list[str]:
    needed = f': "${{HF_ASSETS_PATH:?folder with the tokenizer of {run.model}}}"'
    given = {"HF_ASSETS_PATH": run.hf_assets_path, "DUMP_FOLDER": run.dump_folder}
    lines = [
        f'[ -n "${{{name}:-}}" ] || {name}={shlex.quote(folder)}'
        for name, folder in given.items()
        if folder is not None
    ]
    return lines if run.hf_assets_path is not None else [needed, *lines]


def _slurm(run: ClusterRun) -> list[str]:
    nodes = (gpu * _NUMA_NODES // run.gpus_per_node for gpu in range(run.gpus_per_node))
    binding = f"map_ldom:{','.join(map(str, nodes))}"
    return [
        f'srun --cpus-per-task={_CORES_OF_A_RANK} --cpu-bind="${{CPU_BIND:-{binding}}}" \\',
        f"    gt-train {shlex.join(run.arguments)} \\",
        *_folders(run),
    ]


def _torchrun(run: ClusterRun) -> list[str]:
    endpoint = "-localhost:29400" if run.num_nodes == 1 else "?host:port of one of the nodes"
    return [
        (
            f"torchrun --nnodes {run.num_nodes} --nproc-per-node {run.gpus_per_node} "
            '--numa-binding "${NUMA_BINDING:-node}" \\'
        ),
        f'    --rdzv-backend c10d --rdzv-id "${{RDZV_ID:-{run.name}}}" \\',
        f'    --rdzv-endpoint "${{RDZV_ENDPOINT:{endpoint}}}" \\',
        f"    -m gt_trainer {shlex.join(run.arguments)} \\",
        *_folders(run),
    ]


def _folders(run: ClusterRun) -> list[str]:
    return [
        '    --hf_assets_path "$HF_ASSETS_PATH" \\',
        f'    --dump_folder "${{DUMP_FOLDER:-outputs/{run.name}}}" \\',
        '    "$@"',
    ]
