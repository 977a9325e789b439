"""Which distributed job this process was started into, read from its environment.

torchtitan initialises its process group from five variables (``env://``). torchrun sets them. Slurm
does not, so they are derived from what ``srun`` sets for every task of a job step. A shell inside
``sbatch`` or ``salloc`` also sees SLURM_PROCID and SLURM_NTASKS although nothing was started n
times; only a *step* (SLURM_STEP_ID) of more than one task counts as a job to join.

Source: the variables are those of ``torchrun`` (torch.distributed.run) and of srun's manual page.
Standard library only: the command line is judged before torch is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LOOPBACK = "127.0.0.1"

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Slurm gives a job no port, and all its tasks must agree on one without talking to each other.
_FIRST_SLURM_PORT = 20_000
_NUM_SLURM_PORTS = 10_000


class RendezvousError(ValueError):
    """The environment describes a distributed job incompletely or in contradiction to itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """One process's place in a distributed job, and where the job meets."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    """Number of the job's processes on this machine; None where the launcher does not say."""
    master_addr: str
    master_port: int
    source: Literal["torchrun", "Slurm", "gt-train"]
    """Who started the processes, for messages."""

    @property
    def is_on_one_host(self) -> bool:
        """Whether all processes of the job are on this machine, as far as the launcher says."""
        return self.local_world_size == self.world_size

    def environment(self) -> dict[str, str]:
        """Return the variables that torch's ``env://`` and torchtitan read."""
        variables = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }
        if self.local_world_size is not None:
            variables["LOCAL_WORLD_SIZE"] = str(self.local_world_size)
        return variables


def find_rendezvous(environment: Mapping[str, str]) -> Rendezvous | None:
    """Return the job that this process belongs to, or None if it was started on its own.

    Args:
        environment: The process's environment variables.

    Raises:
        RendezvousError: Variables of a job are there, but some are missing or make no sense. The
            text lists all of them.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _from_torchrun(environment)
    if "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        return _from_slurm(environment)
    return None


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list such as ``gpu[007-010,12],login1``.

    Every bracket holds comma-separated numbers and ranges, whose leading zeros belong to the name;
    a name may hold several brackets.

    Raises:
        RendezvousError: The list is empty or its brackets do not match.
    """
    name = re.match(r"(?:[^\[\],\s]|\[[^\[\]]*\])+(?=,|$)", nodelist)
    if name is None:
        raise RendezvousError(f"the Slurm node list {nodelist!r} names no host")
    first = re.sub(r"\[\s*(\d+)[^\]]*\]", r"\1", name.group())
    if "[" in first:
        raise RendezvousError(f"the Slurm node list {nodelist!r} has a bracket without a number")
    return first


def _from_torchrun(environment: Mapping[str, str]) -> Rendezvous:
    missing = [name for name in _TORCHRUN_VARIABLES if not environment.get(name)]
    if missing:
        present = [name for name in _TORCHRUN_VARIABLES if environment.get(name)]
        raise RendezvousError(
            f"the environment has {', '.join(present) or 'empty values'} but lacks "
            f"{', '.join(missing)}: set all of {', '.join(_TORCHRUN_VARIABLES)}, as torchrun does, "
            "or unset them all and use --nproc"
        )
    local_world_size = (
        _integer(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else None
    )
    return _checked(
        Rendezvous(
            rank=_integer(environment, "RANK"),
            world_size=_integer(environment, "WORLD_SIZE"),
            local_rank=_integer(environment, "LOCAL_RANK"),
            local_world_size=local_world_size,
            master_addr=environment["MASTER_ADDR"],
            master_port=_integer(environment, "MASTER_PORT"),
            source="torchrun",
        )
    )


def _from_slurm(environment: Mapping[str, str]) -> Rendezvous | None:
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    nodes_name = (
        "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environment else "SLURM_JOB_NODELIST"
    )
    if environment.get(size_name) == "1":
        return None
    needed = ["SLURM_LOCALID", size_name]
    if "MASTER_ADDR" not in environment:
        needed.append(nodes_name)
    if "MASTER_PORT" not in environment:
        needed.append("SLURM_JOB_ID")
    missing = [name for name in needed if not environment.get(name)]
    if missing:
        raise RendezvousError(
            f"this process is a task of a Slurm job step, but its environment lacks "
            f"{', '.join(missing)}: start it with srun, or set RANK, WORLD_SIZE, LOCAL_RANK, "
            "MASTER_ADDR and MASTER_PORT yourself"
        )
    num_tasks, num_here = _integer(environment, size_name), _tasks_on_this_node(environment)
    meeting_host = LOOPBACK
    if num_here != num_tasks and "MASTER_ADDR" not in environment:
        meeting_host = first_host(environment[nodes_name])
    return _checked(
        Rendezvous(
            rank=_integer(environment, "SLURM_PROCID"),
            world_size=num_tasks,
            local_rank=_integer(environment, "SLURM_LOCALID"),
            local_world_size=num_here,
            master_addr=environment.get("MASTER_ADDR") or meeting_host,
            master_port=_slurm_port(environment),
            source="Slurm",
        )
    )


def _slurm_port(environment: Mapping[str, str]) -> int:
    """Return a port on which all tasks of this step agree, and other steps rarely do."""
    if "MASTER_PORT" in environment:
        return _integer(environment, "MASTER_PORT")
    job, step = _integer(environment, "SLURM_JOB_ID"), _integer(environment, "SLURM_STEP_ID")
    return _FIRST_SLURM_PORT + (job * 7 + step) % _NUM_SLURM_PORTS


def _tasks_on_this_node(environment: Mapping[str, str]) -> int | None:
    """Read SLURM_STEP_TASKS_PER_NODE, as ``4(x2),3``: 4 tasks on each of two nodes, then 3."""
    counts = environment.get("SLURM_STEP_TASKS_PER_NODE")
    node = environment.get("SLURM_NODEID")
    if counts is None or node is None or not node.isdecimal():
        return None
    per_node: list[int] = []
    for entry in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if match is None:
            return None
        per_node += [int(match[1])] * int(match[2] or 1)
    return per_node[int(node)] if int(node) < len(per_node) else None


def _integer(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    try:
        return int(text)
    except ValueError:
        raise RendezvousError(f"{name} is {text!r}, which is no integer") from None


def _checked(rendezvous: Rendezvous) -> Rendezvous:
    wrong: list[str] = []
    if rendezvous.world_size < 1:
        wrong.append(f"world size {rendezvous.world_size} is not positive")
    elif not 0 <= rendezvous.rank < rendezvous.world_size:
        wrong.append(
            f"rank {rendezvous.rank} is outside 0..{rendezvous.world_size - 1} of world size "
            f"{rendezvous.world_size}"
        )
    if rendezvous.local_rank < 0:
        wrong.append(f"local rank {rendezvous.local_rank} is negative")
    if not 0 <= rendezvous.master_port < 2**16:
        wrong.append(f"port {rendezvous.master_port} is outside 0..65535")
    if wrong:
        raise RendezvousError(f"{rendezvous.source}'s environment is wrong: {'; '.join(wrong)}")
    return rendezvous
