"""Published runs are command lines by name."""

from collections import Counter

import pytest

from gt_passes import simulation
from gt_passes.simulation.hardware import shipped_hardware
from gt_trainer.command_line.command_line import UsageError, listing, parse_command_line
from gt_trainer.command_line.early_refusal import refuse_early
from gt_trainer.models.catalog import CATALOG
from gt_trainer.models.held_out_runs import HELD_OUT_RUNS
from gt_trainer.models.published_runs import PUBLISHED_RUNS


def test_the_report_has_eighteen_rows_in_six_tables():
    tables = Counter(run.source.rpartition(", ")[2] for run in PUBLISHED_RUNS.values())
    assert tables == {
        "table 1": 3, "table 2": 4, "table 3": 3, "table 4": 2, "table 5": 2, "table 6": 4
    }  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED_RUNS)
def test_a_published_run_is_a_command_line_that_breaks_no_rule(name):
    run = PUBLISHED_RUNS[name]
    assert run.config in CATALOG[run.module]
    assert getattr(simulation, run.hardware)().gpus_per_node == 8
    command = parse_command_line(["--dry-run", "--published", name])
    assert (command.module, command.config) == (run.module, run.config)
    assert (command.world_size, command.overrides) == (run.world_size, run.flags)
    refuse_early(command, run.world_size)


@pytest.mark.parametrize("name", HELD_OUT_RUNS)
def test_a_held_out_run_breaks_no_rule_and_is_none_of_the_published(name):
    run = HELD_OUT_RUNS[name]
    assert run.name == name
    assert name not in PUBLISHED_RUNS
    assert shipped_hardware(f"{run.hardware}.json").gpus_per_node == 8
    flags = ["--module", run.module, "--config", run.config, *run.flags]
    command = parse_command_line(["--dry-run", "--world-size", str(run.world_size), *flags])
    refuse_early(command, run.world_size)


def test_what_is_typed_beside_a_published_run_counts():
    command = parse_command_line(
        ["--dry-run", "--published", "llama3_8b_8_fsdp", "--world-size", "16", "--batch", "1"]
    )
    assert command.world_size == 16
    assert command.overrides[-2:] == ("--training.local_batch_size", "1")


def test_a_published_run_says_itself_which_model_it_is_of():
    with pytest.raises(UsageError) as refused:
        parse_command_line(["--published", "llama3_8b_8_fsdp", "--config", "llama3_70b"])
    assert str(refused.value) == (
        "--published llama3_8b_8_fsdp says which model is run: leave out --config"
    )


def test_an_unknown_published_run_is_refused_with_near_matches():
    with pytest.raises(UsageError, match=r"no published run 'llama3_8b_8_fdsp'\. Did you mean"):
        parse_command_line(["--published", "llama3_8b_8_fdsp"])


def test_published_runs_are_listed_with_what_was_measured():
    listed = listing()
    for run in PUBLISHED_RUNS.values():
        assert f"  {run.name} " in listed
        assert f"{run.description} ({run.tokens_per_second_per_gpu:,.0f}, " in listed
