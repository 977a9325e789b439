"""The options of gt-train plan, and what is wrong with them."""

from pathlib import Path

import pytest

from gt_trainer.command_line.command_line import UsageError, parse_command_line
from gt_trainer.command_line.plan_command import split_overrides


def test_reads_what_a_plan_was_asked(tmp_path):
    page = tmp_path / "plan.html"
    command = parse_command_line(
        [
            "plan",
            "--config",
            "llama3_405b",
            "--cluster",
            "h200",
            "--gpus",
            "16384",
            "--global-batch-tokens",
            "16777216",
            "--minutes",
            "2.5",
            "--what-if",
            "nic=800,memory=141",
            "--scaling",
            "5",
            "--page",
            str(page),
        ]
    )
    assert command.action == "plan"
    assert command.plan.cluster == "h200"
    assert command.plan.gpus == 16_384
    assert command.plan.global_batch_tokens == 16_777_216
    assert command.plan.minutes == 2.5
    assert command.plan.what_if == {"nic": 800.0, "memory": 141.0}
    assert command.plan.scaling_minutes == 5.0
    assert command.plan.page == Path(page)


def test_every_mistake_is_told_at_once():
    with pytest.raises(UsageError) as raised:
        parse_command_line(
            [
                "plan",
                "--gpus",
                "0",
                "--minutes",
                "soon",
                "--what-if",
                "nics=800",
                "--global-batch-tokens",
                "1.5",
                "--page",
                "/nowhere/x.html",
                "--nproc",
                "4",
            ]
        )
    assert raised.value.problems == (
        "plan takes --gpus and --cluster, and simulates by itself: leave out --nproc",
        "--page is '/nowhere/x.html', and must be a file in a folder that exists",
        "--gpus is '0', and must be a number above 0",
        "--global-batch-tokens is '1.5', and must be a whole number",
        "--minutes is 'soon', and must be a number above 0",
        (
            "--what-if has 'nics=800', and takes nic=GBIT_PER_S and memory=GB, such as "
            "nic=800,memory=141"
        ),
    )


def test_options_of_a_plan_belong_to_nothing_else():
    with pytest.raises(UsageError, match="--gpus, --minutes belongs to gt-train plan"):
        parse_command_line(["--gpus", "8", "--minutes", "1"])


def test_flags_that_recipes_set_are_told_from_others():
    typed = ("--training.seq_len", "4096", "--compile.ep_overlap.no_enabled")
    typed += ("--parallelism.tensor_parallel_degree=4", "--debug.seed", "7")
    assert split_overrides(typed) == (
        ("--compile.ep_overlap.no_enabled", "--parallelism.tensor_parallel_degree=4"),
        ("--training.seq_len", "4096", "--debug.seed", "7"),
    )


def test_a_page_does_not_take_the_place_of_its_data(tmp_path):
    page = str(tmp_path / "plan.json")
    with pytest.raises(UsageError) as raised:
        parse_command_line(["plan", "--config", "llama3_405b", "--gpus", "8", "--page", page])
    assert raised.value.problems == (
        f"--page is {page!r}, where the plan's data would be: name it .html",
    )


def test_a_run_beside_is_typed_as_its_flags_in_one_word():
    command = parse_command_line(
        ["plan", "--beside", "--parallelism.tensor_parallel_degree 8 --batch 2", "--gpus", "8"]
    )
    assert command.plan.beside == (
        *("--parallelism.tensor_parallel_degree", "8"),
        *("--training.local_batch_size", "2"),
    )
    assert command.plan.gpus == 8
    assert command.overrides == ()


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        pytest.param(
            ["--beside", "tp 8"],
            "--beside is 'tp 8', and takes the flags of a run in one word, such as "
            "'--parallelism.tensor_parallel_degree 8 --compile.memory_policy selective'",
            id="no_flags",
        ),
        pytest.param(
            ["--beside", "--a 'b"],
            '--beside is "--a \'b", which is no command line: No closing quotation',
            id="no_words",
        ),
        pytest.param(
            ["--beside=--batch 2 --config llama3_70b"],
            "--beside has --config, which is the plan's to say: it takes flags of the "
            "configuration",
            id="options_of_ours",
        ),
        pytest.param(["--beside", "--gpus", "8"], "--beside needs a value", id="an_option_follows"),
        pytest.param(["--beside"], "--beside needs a value", id="nothing_follows"),
        pytest.param(
            ["--beside", "--batch 1", "--beside", "--batch 2"],
            "--beside is given twice",
            id="twice",
        ),
    ],
)
def test_a_run_beside_that_is_none_is_refused(typed, problem):
    with pytest.raises(UsageError) as raised:
        parse_command_line(["plan", "--config", "llama3_8b", *typed])
    assert raised.value.problems == (problem,)
