"""A run beside a plan is a dry run of its flags; what cannot be compared is refused first."""

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import pytest
from planning.runs_beside import GPUS, PARALLELISM, SEQUENCES, checked, simulated_both_ways

from gt_trainer import device
from gt_trainer.launcher.child import RunningChild
from gt_trainer.planning.candidates import NoRecipeError
from gt_trainer.planning.recipe_outcome import RecipeOutcome, Unsimulated
from gt_trainer.planning.run_beside import finish_beside, recipe_of


@pytest.mark.parametrize(
    "flags",
    [
        # None of these has the values that recipes of a plan have.
        (f"{PARALLELISM}tensor_parallel_degree", "2", "--training.local_batch_size", "2"),
        (
            *(f"{PARALLELISM}pipeline_parallel_degree", "2"),
            *(f"{PARALLELISM}pipeline_parallel_microbatch_size", "2"),
            *("--training.local_batch_size", "4", "--compile.memory_policy", "full_recompute"),
        ),
    ],
    ids=["step", "pipeline"],
)
def test_a_run_beside_takes_what_a_dry_run_of_its_flags_says(flags):
    # Forks of a process that has captured fail, and this one may have, in another test.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=device.install, initargs=("cpu",)) as fresh:
        beside, dry = fresh.submit(simulated_both_ways, *flags).result()
    found = beside.result
    assert isinstance(found, RecipeOutcome), found
    assert beside.flags[-2:] == ("--training.global_batch_size", "8")
    assert (found.step_us, found.peak_bytes) == dry
    tokens = found.tokens_per_second_per_gpu * found.step_us / 1e6 * GPUS
    assert tokens == pytest.approx(SEQUENCES * 64)


def test_a_run_beside_has_the_batch_of_the_plan():
    run = checked("--training.local_batch_size", "1")
    assert run.flags[-2:] == ("--training.global_batch_size", "8")
    assert run.config.training.global_batch_size == 8
    recipe = recipe_of(run.config, GPUS)
    assert (recipe.dp_shard, recipe.num_microbatches, recipe.microbatch) == (4, 2, 1)
    said = ("--training.local_batch_size", "1", "--training.global_batch_size", "8")
    assert checked(*said).flags == run.flags
    implied = ("--training.local_batch_size", "2", "--training.global_batch_size", "-1")
    assert recipe_of(checked(*implied).config, GPUS).global_batch == 8


def test_everything_that_is_wrong_is_told_at_once():
    with pytest.raises(NoRecipeError) as raised:
        checked(
            *(f"{PARALLELISM}tensor_parallel_degree", "3", "--compile.autoparallel"),
            *("--training.global_batch_size", "6"),
        )
    *begin, last = str(raised.value).partition("the configuration has ")
    assert "".join(begin) == (
        "the run of --beside cannot be compared:\n"
        "  a solver places it, for minutes: --dry-run simulates it alone\n"
        "  its step has 6 sequences, the plan's 8\n"
        "  on 4 GPUs, with the plan's batch of 8 sequences, the configuration has "
    )
    assert f"{PARALLELISM}tensor_parallel_degree is 3\n" in last


def test_a_run_that_cannot_be_captured_is_told_with_the_reason():
    def fail():
        raise ValueError("no such operator")

    run = checked()
    found = finish_beside(run, GPUS, RunningChild(fail), tell=print, is_stopped=lambda: False)
    assert found.result == Unsimulated(
        recipe=recipe_of(run.config, GPUS),
        reason="ValueError: no such operator",
    )


def test_nobody_waits_when_the_search_was_stopped():
    run, told = checked(), []
    child = RunningChild(lambda: time.sleep(60))
    found = finish_beside(run, GPUS, child, tell=told.append, is_stopped=lambda: True)
    child.kill()
    assert found.result.reason == "the search was stopped"
    assert told == ["the search is over, and waits for the run beside it"]
