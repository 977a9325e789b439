"""``python -m gt_trainer.command_line.write_known_flags`` writes ``known_flags.json`` anew."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json

from gt_trainer.command_line.known_flags import PACKAGE, TABLE
from gt_trainer.command_line.overrides import help_entries
from gt_trainer.device import install
from gt_trainer.models.catalog import CATALOG


def make_table() -> str:
    """Return the table's text for the torchtitan that is installed. Imports all models."""
    install("cpu")
    entries: dict[str, str] = {}
    differences: dict[str, dict[str, str | None]] = {}
    for module, configs in CATALOG.items():
        functions = importlib.import_module(f"gt_trainer.models.{module}")
        for name in configs:
            config = getattr(functions, name)()
            tokenizer = config.hf_assets_path.replace(PACKAGE, "GT_TRAINER")
            own = help_entries(dataclasses.replace(config, hf_assets_path=tokenizer))
            entries = entries or own
            assert own.keys() <= entries.keys(), "the first configuration has every flag"
            differences[name] = {
                key: own.get(key) for key in entries if own.get(key) != entries[key]
            }
    table = {
        "torchtitan": importlib.metadata.version("torchtitan"),
        "tyro": importlib.metadata.version("tyro"),
        "entries": entries,
        "differences": differences,
    }
    return json.dumps(table, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TABLE.write_text(make_table())
