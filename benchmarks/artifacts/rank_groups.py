"""How many graphs ranks need: ``python -m artifacts.rank_groups WORKLOAD [STAGE ...]``.

No rank exists: witnesses capture one after another, each in a child, and documents are compared as
in a run (``gt_trainer.precompile``). Of a pipeline each distinct stage is looked at, or those that
are named. Prints one line of JSON: by graph, numbers of groups, ranks and captures, and the groups
with their reasons.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import resource
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any

from gt_trainer import device

device.install("cpu")  # before the imports below, whose modules copy their device

import torch  # noqa: E402
from artifacts.grouped_workloads import GROUPED, WORLD_SIZE  # noqa: E402

from gt_trainer.artifacts.alike_ranks import RankGroup, groups_text  # noqa: E402
from gt_trainer.launcher import run_in_child  # noqa: E402
from gt_trainer.precompile.precompile import (  # noqa: E402
    CAPTURE_SECONDS,
    AlikeParts,
    alike_parts,
    store_graphs,
)

__all__ = ["groups_of_stages", "main"]


def main(workload: str, *stages: str) -> None:
    """Print what was found."""
    module, name = GROUPED[workload]
    config = getattr(importlib.import_module(f"gt_trainer.models.{module}"), name)()
    with tempfile.TemporaryDirectory() as folder:
        config.compile = dataclasses.replace(config.compile, artifacts=folder)
        found = groups_of_stages(config, WORLD_SIZE, list(map(int, stages)) or None)
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    record = {
        "cpu_seconds": sum(each.ru_utime + each.ru_stime for each in usage),
        "graphs": {
            graph: {
                "groups": len(groups),
                "ranks": sum(len(each.ranks) for each in groups),
                "captures": sum(len(each.captured_by) for each in groups),
                "text": " ".join(groups_text(groups).split()),
            }
            for graph, groups in found.items()
        },
    }
    sys.stdout.write(json.dumps(record) + "\n")


def groups_of_stages(
    config: Any, world_size: int, stages: Sequence[int] | None = None
) -> dict[str, tuple[RankGroup, ...]]:
    """Which ranks share graphs: of a whole step ("step"), or by stages that are alike.

    Args:
        config: a finished configuration; ``compile.artifacts`` is a folder.
        world_size: number of ranks, none of which is started.
        stages: to look at, with those like them; None: all.
    """
    parts: tuple[AlikeParts, ...] = run_in_child(
        partial(alike_parts, config, world_size), timeout_seconds=CAPTURE_SECONDS
    )
    if stages is not None:
        parts = tuple(each for each in parts if {*stages} & {*each.stages.values()})
    found: dict[str, list[RankGroup]] = {}
    for group in store_graphs(config, world_size, parts).groups:
        found.setdefault(group.part or "step", []).append(group)
    return {graph: tuple(groups) for graph, groups in found.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
