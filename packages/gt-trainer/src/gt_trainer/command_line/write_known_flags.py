"""``python -m gt_trainer.command_line.write_known_flags`` writes ``known_flags.json`` anew."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gt_config.option_paths import option_at, option_paths
from gt_passes import known_passes
from gt_trainer.command_line.known_flags import TABLE
from gt_trainer.command_line.overrides import flags_in, help_text
from gt_trainer.compile_options import TrainerCompileConfig
from gt_trainer.device import install, intended_for
from gt_trainer.models.catalog import CATALOG
from gt_trainer.preflight.plain_settings import settings_of

if TYPE_CHECKING:
    from gt_trainer.trainer import GraphTrainer


def make_table() -> str:
    """Return the table's text for the torchtitan that is installed. Imports all models."""
    install("cpu")
    kinds: dict[str, str] = {}
    choices: set[str] = set()
    settings: dict[str, dict[str, Any]] = {}
    for module, configs in CATALOG.items():
        functions = importlib.import_module(f"gt_trainer.models.{module}")
        for name in configs:
            text = help_text(getattr(functions, name)())
            kinds |= {flag: kind for flag, kind in flags_in(text).items() if flag not in kinds}
            choices |= {*re.findall(r"• (\w+):", text)}
            settings[name] = _judged(getattr(functions, name), first=settings)
    table = {
        "torchtitan": importlib.metadata.version("torchtitan"),
        "tyro": importlib.metadata.version("tyro"),
        "kinds": kinds,
        "choices": sorted(choices),
        "settings": settings,
        "passes": sorted(known_passes()),
    }
    return json.dumps(table, indent=1, ensure_ascii=False) + "\n"


def _judged(
    make: Callable[[], GraphTrainer.Config], *, first: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The values of a configuration, without those that the first one has too."""
    values = _settings(make())
    with intended_for("cuda"):
        on_gpu = _settings(make())
    # Imported here: torchtitan must not be before the device is installed.
    from gt_trainer.preflight.preflight import model_numbers_of

    model = model_numbers_of(make())
    known = next(iter(first.values()))["values"] if first else {}
    return {
        "values": {k: v for k, v in values.items() if k not in known or known[k] != v},
        "gpu_defaults": {k: v for k, v in on_gpu.items() if values[k] != v},
        "model": None if model is None else dataclasses.asdict(model),
    }


def _settings(config: GraphTrainer.Config) -> dict[str, Any]:
    options = {
        f"--compile.{path}": option_at(config.compile, path)
        for path in option_paths(TrainerCompileConfig)
    }
    return settings_of(config) | options


if __name__ == "__main__":
    TABLE.write_text(make_table())
