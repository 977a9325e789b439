"""Scripts that start a run on the nodes of a cluster, for Slurm and for torchrun. No torch."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

_CORES_OF_A_RANK = 12
_NUMA_NODES = 2
_ASSETS, _DUMP = "--hf_assets_path", "--dump_folder"


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
    """Of gt-train, as typed. Where they lack the tokenizer's folder or the dump folder, the scripts
    take it from a variable."""


def launch_scripts(run: ClusterRun) -> dict[str, str]:
    """The scripts' texts, by file name: ``NAME.sbatch`` and ``NAME.torchrun.sh``.

    Ranks are numbered node by node, so that ranks next to one another share a node; torchrun's c10d
    rendezvous sorts nodes by their names (torch/distributed/elastic/rendezvous). Variables that the
    scripts read are those of ``launch/README.md``.
    """
    return {
        f"{run.name}.sbatch": "\n".join([*_head(run, slurm=True), *_slurm(run)]) + "\n",
        f"{run.name}.torchrun.sh": "\n".join([*_head(run, slurm=False), *_torchrun(run)]) + "\n",
    }


def _head(run: ClusterRun, *, slurm: bool) -> list[str]:
    on_each = "the node" if run.num_nodes == 1 else f"each of the {run.num_nodes} nodes"
    endpoint = "RDZV_ENDPOINT=host:port " if run.num_nodes > 1 else ""
    started = f"sbatch {run.name}.sbatch" if slurm else f"{endpoint}./{run.name}.torchrun.sh"
    needs_assets = _lacks(run, _ASSETS)
    lines = [
        "#!/bin/bash",
        f"# {run.what}." + ("" if slurm else f" Start it on {on_each}:"),
        f"# {'HF_ASSETS_PATH=... ' if needs_assets else ''}{started} [more options of gt-train]",
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
            "# torchrun numbers nodes by their sorted names: those of the "
            f"{run.hosts_per_domain} in an NVLink domain have to be next to one another."
        )
    lines.append("set -euo pipefail")
    if needs_assets:
        lines.append(f': "${{HF_ASSETS_PATH:?folder with the tokenizer of {run.model}}}"')
    return [
        *lines,
        'export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"',
        f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{_CORES_OF_A_RANK}}}"',
        "",
    ]


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
    given = {
        _ASSETS: '"$HF_ASSETS_PATH"',
        _DUMP: f'"${{DUMP_FOLDER:-outputs/{run.name}}}"',
    }
    lines = [f"    {flag} {value} \\" for flag, value in given.items() if _lacks(run, flag)]
    return [*lines, '    "$@"']


def _lacks(run: ClusterRun, flag: str) -> bool:
    typed = (word.partition("=")[0].replace("-", "_") for word in run.arguments)
    return flag.replace("-", "_") not in typed
