"""Plans of debug models: their command lines pass a dry run, and train on as many processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gt_trainer.planning.run_recipe import RunRecipe

_FIRST = 4


def gt_train(folder: Path, *arguments: str, timeout: float = 1200) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "gt_trainer", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "GT_DEVICE": "cpu"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(folder: Path, flags: list[str], *, nproc: int) -> list[float]:
    """Losses of two steps."""
    gt_train(
        folder,
        *("--nproc", str(nproc), "--steps", "2", "--dump_folder", str(folder)),
        "--checkpoint.no_enable",
        *flags,
    )
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_a_recipe_starts_on_as_many_processes(tmp_path: Path) -> None:
    recipe = RunRecipe(
        dp_shard=2,
        pp=2,
        schedule="1F1B",
        microbatch=1,
        global_batch=8,
        memory_policy="full_recompute",
    )
    losses = train(tmp_path, [*recipe.flags(), "--seq-len", "256"], nproc=4)
    assert len(losses) == 2
    assert losses[1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("config", ["llama3_debugmodel", "deepseek_v3_debugmodel"])
def test_the_first_recipes_of_a_plan_train_and_the_first_passes_its_dry_run(
    tmp_path: Path, config: str
) -> None:
    page = tmp_path / "plan.html"
    told = gt_train(
        tmp_path,
        *("plan", "--config", config, "--gpus", "4", "--global-batch-tokens", "4096"),
        *("--minutes", "2", "--page", str(page), "--what-if", "memory=141"),
    )
    assert " failed, " in told
    assert ", 0 failed, " in told
    *_, command, dry_run, written = told.strip().splitlines()
    assert written.startswith(f"written: {page}")
    assert "Dry run of" in gt_train(tmp_path, *dry_run.split()[1:])
    commands = json.loads(page.with_suffix(".json").read_text())["recipes"][:_FIRST]
    losses = []
    for index, recipe in enumerate(commands):
        folder = tmp_path / str(index)
        folder.mkdir()
        losses.append(train(folder, recipe["command"].split()[1:], nproc=4))
    assert command.split()[1:] == commands[0]["command"].split()[1:]
    for each in losses:
        assert each == pytest.approx(losses[0], rel=1e-3)
