"""Find misspelled flags of the configuration before torch is imported.

The flags are the fields of dataclasses that take twelve seconds to import. ``known_flags.json``
holds their names, over all configurations of the catalog, together with the torchtitan version that
they were read from. With another version installed the table is not consulted, and a misspelled
flag is found after the import. What the table passes, tyro still judges (``overrides``).

``python -m gt_trainer.command_line.known_flags`` writes the table anew; a test fails when it is out
of date.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from collections.abc import Iterable
from pathlib import Path

from gt_trainer.command_line.near_matches import did_you_mean
from gt_trainer.models.catalog import CATALOG

TABLE = Path(__file__).with_suffix(".json")
"""File with the flags' names and the version of torchtitan that has them."""


def explain_unknown_flags(arguments: Iterable[str]) -> list[str]:
    """Return a message for each argument that is a flag of no configuration in the catalog.

    Args:
        arguments: Flags and values as typed, without our own options.
    """
    table = json.loads(TABLE.read_text())
    if importlib.metadata.version("torchtitan") != table["torchtitan"]:
        return []
    known: list[str] = table["flags"]
    names = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    return [
        f"no flag {name!r}.{did_you_mean(_with_underscores(name), known)}"
        for name in dict.fromkeys(names)
        if not _may_exist(_with_underscores(name), frozenset(known))
    ]


def make_table() -> str:
    """Return the table's text for the torchtitan that is installed. Imports all models."""
    from gt_trainer.command_line.overrides import flag_names
    from gt_trainer.device import install

    install()
    flags: set[str] = set()
    for module, configs in CATALOG.items():
        functions = importlib.import_module(f"gt_trainer.models.{module}")
        for name in configs:
            flags.update(flag_names(getattr(functions, name)()))
    table = {"torchtitan": importlib.metadata.version("torchtitan"), "flags": sorted(flags)}
    return json.dumps(table, indent=1) + "\n"


def _may_exist(flag: str, known: frozenset[str]) -> bool:
    if flag in known or flag.startswith("--tyro_"):
        return True
    # A choice, such as activation_checkpoint:full, brings flags of its own.
    group, dot, name = flag.rpartition(".")
    if dot and group in known:
        return True
    positive = f"{group}{dot}{name.removeprefix('no_')}" if dot else flag.replace("--no_", "--", 1)
    return positive in known


def _with_underscores(flag: str) -> str:
    return "--" + flag.removeprefix("--").replace("-", "_")


if __name__ == "__main__":
    TABLE.write_text(make_table())
