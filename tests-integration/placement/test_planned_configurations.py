"""Every shipped configuration is planned at its intended size, fits, and is set beside the expert.

As ``gt-train --dry-run --compile.autoparallel`` does it, one process and no weights. One takes one
to five minutes of a processor and up to 3 GiB: ``pytest -m slow`` with its name.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest

from gt_autoparallel import PlacementPrices, read_plan
from gt_trainer.device import intended_for
from gt_trainer.dry_run.dry_run import dry_run
from gt_trainer.models import deepseek_v3
from gt_trainer.models.catalog import CATALOG, INTENDED_WORLD_SIZE
from gt_trainer.preflight.preflight import check_configuration
from gt_trainer.preflight.settled_defaults import settle_defaults, settled_by_hand

RANKS_OF_MINIATURES = 4

MESHES = {
    "llama3_debugmodel": "dp_shard 4",
    "llama3_debugmodel_flex_attn": "dp_shard 4",
    "llama3_8b": "dp_shard 4 x tp 2",
    "llama3_70b": "dp_shard 32 x tp 8",
    "llama3_405b": "dp_shard 128 x tp 8",
    "llama3_405b_pp": "pp 8 x dp_shard 8 x tp 8",
    "qwen3_debugmodel": "dp_shard 4",
    "qwen3_moe_debugmodel": "dp_shard 4",
    "qwen3_14b": "dp_shard 8",
    "deepseek_v3_debugmodel": "dp_shard 4",
    "deepseek_v3_debugmodel_sdpa": "dp_shard 4",
    "deepseek_v3_16b": "dp_shard 32 x ep 32",
    "deepseek_v3_16b_sdpa": "dp_shard 32 x ep 32",
    "deepseek_v3_671b": "dp_shard 512 x ep 64",
    "deepseek_v3_671b_pp": "pp 16 x dp_shard 128 x ep 64",
}
"""Configuration -> the mesh that it is meant for; of miniatures, which are meant for one rank, four
ranks."""


SHIPPED = [(module, name) for module, table in CATALOG.items() for name in table]


def ranks_of(name: str) -> int:
    return max(RANKS_OF_MINIATURES, INTENDED_WORLD_SIZE[name])


def with_a_solver(module: str, name: str) -> tuple[Any, Any]:
    """A configuration that was accepted, and the same run by hand."""
    with intended_for("cuda"):
        config = getattr(importlib.import_module(f"gt_trainer.models.{module}"), name)()
        config.compile = dataclasses.replace(config.compile, autoparallel=True)
        by_hand = settled_by_hand(config, ranks_of(name))
        config, _ = settle_defaults(config, ranks_of(name))
        check_configuration(config, ranks_of(name), will_train=False)
    return config, by_hand


def test_the_table_has_every_shipped_configuration() -> None:
    assert MESHES.keys() == INTENDED_WORLD_SIZE.keys()


@pytest.mark.parametrize(("module", "name"), SHIPPED)
def test_a_shipped_configuration_is_accepted_with_a_solver(module: str, name: str) -> None:
    _, by_hand = with_a_solver(module, name)
    assert by_hand is not None


@pytest.mark.slow
@pytest.mark.parametrize(("module", "name"), SHIPPED)
def test_a_shipped_configuration_is_planned_and_fits_beside_the_expert(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # plans go to the dump folder
    config, by_hand = with_a_solver(module, name)
    with intended_for("cuda"):
        report = dry_run(config, ranks_of(name), by_hand=by_hand)
    assert " x ".join(f"{axis} {degree}" for axis, degree in report.degrees) == MESHES[name]
    assert report.simulated.fits
    assert report.remedy is None
    assert report.beside_by_hand is not None
    assert "Planned and placed by hand at the same degrees" in str(report)
    pages = list(tmp_path.rglob("placement*.html"))
    assert pages
    assert all('<details class="why">' in page.read_text() for page in pages)


@pytest.mark.slow
def test_both_backends_of_planned_steps_have_one_placement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plans = []
    for backend in ("none", "regional", "autoparallel_backend"):
        folder = tmp_path / backend
        folder.mkdir()
        monkeypatch.chdir(folder)
        with intended_for("cuda"):
            config = deepseek_v3.deepseek_v3_debugmodel()
            config.compile = dataclasses.replace(
                config.compile, autoparallel=True, inductor_compilation=backend
            )
            config.parallelism = dataclasses.replace(
                config.parallelism, data_parallel_shard_degree=4, tensor_parallel_degree=2
            )
            config, _ = settle_defaults(config, 8, asked=("--compile.inductor_compilation",))
            check_configuration(config, 8, will_train=False)
            report = dry_run(config, 8)
        (file,) = folder.rglob("placement.json")
        plans.append((read_plan(file, prices=PlacementPrices()), report))
    first, judged = plans[0][0], plans[0][1].judgement
    assert any(each.step is not None for each in judged.candidates[1:])
    for plan, report in plans[1:]:
        assert plan.options == first.options
        assert plan.recomputed == first.recomputed
        assert report.judgement == judged
    # What a dry run reports is nevertheless the step of its own backend.
    assert len({report.simulated.step_us for _, report in plans}) == len(plans)
