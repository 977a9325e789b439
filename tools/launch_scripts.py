"""Writes packages/gt-trainer/launch/*: scripts for each published size on nodes of 8 H100.

They come from the catalog and ``gt_trainer.launcher.launch_scripts``, as a plan's do:
``.venv/bin/python tools/launch_scripts.py``.
"""

from __future__ import annotations

from pathlib import Path

from gt_trainer.launcher.launch_scripts import ClusterRun, launch_scripts
from gt_trainer.models.catalog import CATALOG, CatalogEntry

FOLDER = Path(__file__).parents[1] / "packages" / "gt-trainer" / "launch"
_GPUS_PER_NODE = 8


def shipped_scripts() -> dict[str, str]:
    """Texts by file name."""
    entries = (entry for table in CATALOG.values() for entry in table.values())
    published = (entry for entry in entries if "debugmodel" not in entry.config)
    return {
        name: text
        for entry in published
        for name, text in launch_scripts(_cluster_run(entry)).items()
    }


def _cluster_run(entry: CatalogEntry) -> ClusterRun:
    model, _, degrees = entry.description.removesuffix(".").rpartition(": ")
    model = (
        model.rpartition(" on ")[0].replace(" architecture with", "").removesuffix(" parameters")
    )
    return ClusterRun(
        name=entry.config,
        what=f"{model} on {entry.world_size} H100: {degrees}",
        model=model,
        num_nodes=entry.world_size // _GPUS_PER_NODE,
        gpus_per_node=_GPUS_PER_NODE,
        arguments=("--module", entry.module, "--config", entry.config),
    )


if __name__ == "__main__":
    for name, text in shipped_scripts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
