"""Plans of debug models: command lines pass a dry run, and train on as many processes as eager runs do.

An eager run has the degrees, batch and schedule of its recipe, and nothing captured. What a recipe sums
in another order is said by ``reordered``; all else has its bits, but for what gloo adds in buckets
(decision 0005): such a recipe has its bits without those passes.
"""

from __future__ import annotations

import html
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest
from planning import small_models

from gt_trainer.device import intended_for
from gt_trainer.planning.cluster import load_cluster
from gt_trainer.planning.plan_run import PlanQuestion, make_plan
from gt_trainer.planning.run_recipe import RunRecipe

_FIRST = 10
_NUM_STEPS = 3
_REORDERED = 1e-4
"""Relative, of losses and norms: Adam takes a gradient's sign before it has seen its size."""


_STARTS = """
import json, sys
from gt_trainer.command_line import cli

for arguments in json.load(sys.stdin):
    status = cli.main(arguments)
    if status:
        sys.exit(f"{status}: {' '.join(arguments)}")
"""
"""Start after start, each with ranks of its own. What is imported is imported once for all."""


def gt_train(*arguments: str) -> str:
    return _run_python(("-m", "gt_trainer", *arguments))


def train(runs: Mapping[Path, Sequence[str]], *, nproc: int) -> dict[Path, list[float]]:
    """Loss and norm of the gradients, step by step, of the flags for each folder."""
    shared = ("--nproc", str(nproc), "--steps", str(_NUM_STEPS), "--checkpoint.no_enable")
    starts = [[*shared, "--dump_folder", str(folder), *flags] for folder, flags in runs.items()]
    _run_python(("-c", _STARTS), told=json.dumps(starts))
    return {folder: _recorded(folder) for folder in runs}


def _run_python(arguments: Iterable[str], *, told: str = "") -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=Path(__file__).parent,
        input=told,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
        env={**os.environ, "GT_DEVICE": "cpu"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _recorded(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines for name in ("loss", "grad_norm")]


def eager(flags: Sequence[str]) -> tuple[str, ...]:
    """The same run without a capture, and so without what only captured steps have."""
    kept: list[str] = []
    is_kept = True
    for each in flags:
        if each.startswith("--"):
            is_kept = not each.startswith("--compile.")
        if is_kept:
            kept.append(each)
    return (*kept, "--compile.mode", "none")


def values(flags: Sequence[str]) -> Mapping[str, str]:
    """What follows each flag; nothing after a switch."""
    return {
        flag: "" if value.startswith("--") else value
        for flag, value in zip(flags, (*flags[1:], "--"), strict=True)
        if flag.startswith("--")
    }


def reordered(flags: Sequence[str]) -> str | None:
    """Why a recipe's sums have another order than those of its eager run; None if they do not."""
    value = values(flags)
    parallelism = "--parallelism."
    if value.get("--compile.accumulation") == "reduce_once":
        return "microbatches are summed before ranks are"
    if "--compile.ep_overlap.enabled" in value:
        return "experts' gradients are sums over chunks"
    if value[f"{parallelism}pipeline_parallel_degree"] == "1":
        return None
    microbatch = value[f"{parallelism}pipeline_parallel_microbatch_size"]
    axes = ("data_parallel_replicate", "data_parallel_shard", "context_parallel")
    is_reduced = any(value[f"{parallelism}{axis}_degree"] != "1" for axis in axes)
    if is_reduced and value["--training.local_batch_size"] != microbatch:
        return "captured stages reduce once, eager ones each microbatch"
    return None


def without_buckets(flags: Sequence[str]) -> tuple[str, ...] | None:
    """The run whose gradients gloo adds one by one; None where a bucket's have the same bits.

    Of two parts the sum is the same in either order.
    """
    value = values(flags)
    degree = {
        axis: int(value[f"--parallelism.{axis}_degree"])
        for axis in ("data_parallel_replicate", "data_parallel_shard", "context_parallel")
    }
    shards = degree["data_parallel_shard"] * degree["context_parallel"]
    if max(shards, degree["data_parallel_replicate"]) < 3:
        return None
    passes = ["bucket-reduce-scatters"] * (shards > 1)
    passes += ["bucket-all-reduces"] * (degree["data_parallel_replicate"] > 1)
    return (*flags, "--compile.disable_passes", ",".join(passes))


def test_a_recipe_starts_on_as_many_processes(tmp_path: Path) -> None:
    recipe = RunRecipe(
        dp_shard=2,
        pp=2,
        schedule="1F1B",
        microbatch=1,
        global_batch=8,
        memory_policy="full_recompute",
    )
    model = ("--module", "small_models", "--config", "llama3")
    (steps,) = train({tmp_path: [*model, *recipe.flags()]}, nproc=4).values()
    assert len(steps) == 2 * _NUM_STEPS
    assert steps[2] < steps[0]  # the losses


@pytest.mark.slow
def test_a_plan_writes_its_page_and_shows_the_command_that_is_on_it(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    told = gt_train(
        *("plan", "--module", "small_models", "--config", "llama3", "--gpus", "4"),
        *("--global-batch-tokens", "2048", "--minutes", "1", "--page", str(page)),
        *("--what-if", "memory=141", "--parallelism.pipeline_parallel_degree", "2"),
    )
    *_, command, dry_run, written = told.strip().splitlines()
    assert dry_run == f"{command} --dry-run --world-size 4"
    assert written.startswith(f"written: {page}")
    first, *_ = json.loads(page.with_suffix(".json").read_text())["recipes"]
    assert first["command"] == command.strip()
    drawn = page.read_text()
    assert "<span>rank 1</span>" in drawn
    assert html.escape(command.strip()) in drawn


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [4, 8])
@pytest.mark.parametrize(
    ("model", "fixed"),
    [
        pytest.param("llama3", {}, id="llama3"),
        pytest.param("llama3", {"--parallelism.pipeline_parallel_degree": 2}, id="pipelines"),
        pytest.param("deepseek_v3", {}, id="deepseek_v3"),
    ],
)
def test_the_first_recipes_of_a_plan_train_as_eager_runs_do_and_the_first_passes_its_dry_run(
    tmp_path: Path, model: str, fixed: Mapping[str, object], nproc: int
) -> None:
    with intended_for("cuda"):
        config = getattr(small_models, model)()
        question = PlanQuestion(
            cluster=load_cluster("h100_sxm"),
            num_gpus=nproc,
            global_batch_tokens=4 * nproc * config.training.seq_len,
            minutes=60,
            enough=_FIRST,
            what_if={},
            fixed=fixed,
            model_flags=f"--module small_models --config {model}",
        )
        plan = make_plan(config, question, tell=print)
    assert plan.plan.failures == ()
    commands = [tuple(plan.command(each).split()[1:]) for each in plan.ranked[:_FIRST]]
    assert len(commands) == _FIRST
    dry_run = ("--dry-run", "--world-size", str(nproc), "--dump_folder", str(tmp_path))
    assert "Dry run of" in gt_train(*commands[0], *dry_run)
    references = {eager(flags): tmp_path / f"eager {n}" for n, flags in enumerate(commands)}
    runs = {tmp_path / str(n): flags for n, flags in enumerate(commands)}
    recorded = train({**{path: flags for flags, path in references.items()}, **runs}, nproc=nproc)
    expected = {path: recorded[references[eager(flags)]] for path, flags in runs.items()}
    alone = {
        path.with_suffix(".alone"): one_by_one
        for path, flags in runs.items()
        if recorded[path] != expected[path]
        and reordered(flags) is None
        and (one_by_one := without_buckets(flags)) is not None
    }
    recorded |= train(alone, nproc=nproc)
    wrong = []
    for path, flags in runs.items():
        why = reordered(flags)
        is_right = recorded[path] == expected[path]
        if not is_right and (why is not None or path.with_suffix(".alone") in alone):
            why = why or "gloo adds buckets in another order, and without them has the same bits"
            is_right = recorded[path] == pytest.approx(expected[path], rel=_REORDERED)
            is_right &= recorded.get(path.with_suffix(".alone"), expected[path]) == expected[path]
        far = max(abs(a / b - 1) for a, b in zip(recorded[path], expected[path], strict=True))
        told = (
            f"{'right' if is_right else 'WRONG'}, {why or 'bitwise'}: {far:.1e}: {' '.join(flags)}"
        )
        print(told, flush=True)
        if not is_right:
            wrong.append(f"{told}\n{recorded[path]} for {expected[path]}")
    assert not wrong, "\n".join(wrong)
