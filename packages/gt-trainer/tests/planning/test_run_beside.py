"""A run beside a plan is a dry run of its flags; what cannot be compared is refused first."""

import dataclasses
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import pytest

from gt_passes.simulation import h100_sxm
from gt_trainer import device
from gt_trainer.command_line.command_line import flags_given
from gt_trainer.command_line.overrides import apply_overrides
from gt_trainer.device import intended_for
from gt_trainer.dry_run.dry_run import dry_run
from gt_trainer.launcher.child import RunningChild
from gt_trainer.models.llama3 import llama3_debugmodel
from gt_trainer.planning.candidates import NoRecipeError
from gt_trainer.planning.recipe_outcome import RecipeOutcome, Unsimulated
from gt_trainer.planning.run_beside import (
    RunBeside,
    checked_beside,
    finish_beside,
    recipe_of,
    start_beside,
)
from gt_trainer.preflight.settled_defaults import settle_defaults

_GPUS, _SEQUENCES = 4, 8
_PARALLELISM = "--parallelism."


def _two_layers():
    config = llama3_debugmodel()
    spec = config.model_spec
    model = dataclasses.replace(spec.model, layers=spec.model.layers[:2])
    return dataclasses.replace(config, model_spec=dataclasses.replace(spec, model=model))


def _run(*flags) -> RunBeside:
    flags = ("--training.seq_len", "64", "--training.local_batch_size", "2", *flags)
    with intended_for("cuda"):
        config = apply_overrides(_two_layers(), flags)
    return RunBeside(flags=flags, asked=flags_given(flags), config=config)


def _checked(*flags) -> RunBeside:
    return checked_beside(_run(*flags), _GPUS, _SEQUENCES)


def _simulated(*flags):
    """Beside a plan, and by a dry run; called in a process that has captured nothing itself."""
    run = _checked(*flags)
    child = start_beside(run, _GPUS, h100_sxm())
    found = finish_beside(run, _GPUS, child, tell=print, is_stopped=lambda: False)
    return found, _dry_run(run.flags)


def _dry_run(flags):
    with intended_for("cuda"):
        config = apply_overrides(_two_layers(), flags)
        config, _ = settle_defaults(config, _GPUS, asked=flags_given(flags))
        simulated = dry_run(config, _GPUS, hardware=h100_sxm()).simulated
    return simulated.step_us, simulated.peak_bytes


@pytest.mark.parametrize(
    "flags",
    [
        # None of these has the values that recipes of a plan have.
        (f"{_PARALLELISM}tensor_parallel_degree", "2", "--training.local_batch_size", "2"),
        (
            *(f"{_PARALLELISM}pipeline_parallel_degree", "2"),
            *(f"{_PARALLELISM}pipeline_parallel_microbatch_size", "2"),
            *("--training.local_batch_size", "4", "--compile.memory_policy", "full_recompute"),
        ),
    ],
    ids=["step", "pipeline"],
)
def test_a_run_beside_takes_what_a_dry_run_of_its_flags_says(flags):
    # Forks of a process that has captured fail, and this one may have, in another test.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=device.install, initargs=("cpu",)) as fresh:
        beside, dry = fresh.submit(_simulated, *flags).result()
    found = beside.result
    assert isinstance(found, RecipeOutcome), found
    assert beside.flags[-2:] == ("--training.global_batch_size", "8")
    assert (found.step_us, found.peak_bytes) == dry
    tokens = found.tokens_per_second_per_gpu * found.step_us / 1e6 * _GPUS
    assert tokens == pytest.approx(_SEQUENCES * 64)


def test_a_run_beside_has_the_batch_of_the_plan():
    run = _checked("--training.local_batch_size", "1")
    assert run.flags[-2:] == ("--training.global_batch_size", "8")
    assert run.config.training.global_batch_size == 8
    recipe = recipe_of(run.config, _GPUS)
    assert (recipe.dp_shard, recipe.num_microbatches, recipe.microbatch) == (4, 2, 1)
    said = ("--training.local_batch_size", "1", "--training.global_batch_size", "8")
    assert _checked(*said).flags == run.flags
    implied = ("--training.local_batch_size", "2", "--training.global_batch_size", "-1")
    assert recipe_of(_checked(*implied).config, _GPUS).global_batch == 8


def test_everything_that_is_wrong_is_told_at_once():
    with pytest.raises(NoRecipeError) as raised:
        _checked(
            *(f"{_PARALLELISM}tensor_parallel_degree", "3", "--compile.autoparallel"),
            *("--training.global_batch_size", "6"),
        )
    *begin, last = str(raised.value).partition("the configuration has ")
    assert "".join(begin) == (
        "the run of --beside cannot be compared:\n"
        "  a solver places it, for minutes: --dry-run simulates it alone\n"
        "  its step has 6 sequences, the plan's 8\n"
        "  on 4 GPUs, with the plan's batch of 8 sequences, the configuration has "
    )
    assert f"{_PARALLELISM}tensor_parallel_degree is 3\n" in last


def test_a_run_that_cannot_be_captured_is_told_with_the_reason():
    def fail():
        raise ValueError("no such operator")

    run = _checked()
    found = finish_beside(run, _GPUS, RunningChild(fail), tell=print, is_stopped=lambda: False)
    assert found.result == Unsimulated(
        recipe=recipe_of(run.config, _GPUS),
        reason="ValueError: no such operator",
        is_refused=False,
    )


def test_nobody_waits_when_the_search_was_stopped():
    run, told = _checked(), []
    child = RunningChild(lambda: time.sleep(60))
    found = finish_beside(run, _GPUS, child, tell=told.append, is_stopped=lambda: True)
    child.kill()
    assert found.result.reason == "the search was stopped"
    assert told == ["the search is over, and waits for the run beside it"]
