"""Our own options and the names of modules and configurations; no torch is needed."""

from pathlib import Path

import pytest

from gt_trainer.command_line.command_line import (
    UsageError,
    check_launch,
    listing,
    parse_command_line,
    usage,
)
from gt_trainer.command_line.near_matches import did_you_mean
from gt_trainer.launcher import Rendezvous
from gt_trainer.models.catalog import CATALOG
from gt_trainer.models.torchtitan_modules import torchtitan_modules

MODULES = ", ".join([*CATALOG, *torchtitan_modules()])
MISSPELLED_SWITCH = (
    "no flag '--debug.no-determinstic'. "
    "Did you mean '--debug.no_deterministic' or '--debug.deterministic'?"
)


def refusal(*arguments: str) -> str:
    with pytest.raises(UsageError) as refused:
        parse_command_line(arguments)
    return str(refused.value)


def test_no_arguments_train_the_llama3_debug_model_in_one_process():
    command = parse_command_line([])
    assert (command.action, command.module, command.config) == (
        "train",
        "llama3",
        "llama3_debugmodel",
    )
    assert command.num_processes is None
    assert command.shown_ranks == {0}
    assert command.overrides == ()


def test_what_is_not_ours_is_left_for_the_configuration_in_order():
    command = parse_command_line(
        ["--training.steps", "5", "--nproc=2", "activation_checkpoint:none", "--compile.mode=none"]
    )
    assert command.num_processes == 2
    assert command.overrides == (
        "--training.steps",
        "5",
        "activation_checkpoint:none",
        "--compile.mode=none",
    )


@pytest.mark.parametrize(
    "flag",
    [
        "--training.seq-len=8",
        "--debug.no-deterministic",
        "--debug.no_deterministic",
        "--dump_folder=here",
        "--activation_checkpoint.debug",  # exists once a kind of it is chosen; tyro will tell
    ],
)
def test_flags_that_may_exist_are_left_for_tyro(flag):
    assert parse_command_line([flag]).overrides == (flag,)


def test_the_flags_of_a_module_of_the_users_are_left_for_tyro():
    arguments = ["--module", "my.models", "--config", "tiny", "--training.my_own_flag", "3"]
    assert parse_command_line(arguments).overrides == ("--training.my_own_flag", "3")


def test_flags_are_left_for_tyro_when_the_table_is_of_another_torchtitan(monkeypatch):
    monkeypatch.setattr("gt_trainer.command_line.known_flags._table", lambda: None)
    assert parse_command_line(["--training.new", "3"]).overrides == ("--training.new", "3")


@pytest.mark.parametrize(
    ("arguments", "module", "config"),
    [
        (["--module", "qwen3"], "qwen3", "qwen3_debugmodel"),
        (["--config", "qwen3_14b"], "qwen3", "qwen3_14b"),
        (["--module=deepseek_v3", "--config=deepseek_v3_16b"], "deepseek_v3", "deepseek_v3_16b"),
        (["--module", "my.models", "--config", "tiny"], "my.models", "tiny"),
        # Flavors, as torchtitan names them.
        (
            ["--module", "deepseek_v3", "--config", "16B_sdpa"],
            "deepseek_v3",
            "deepseek_v3_16b_sdpa",
        ),
        (["--config", "debugmodel_sdpa"], "deepseek_v3", "deepseek_v3_debugmodel_sdpa"),
        (["--config", "debugmodel_flex_attn"], "llama3", "llama3_debugmodel_flex_attn"),
    ],
)
def test_module_and_configuration_imply_each_other_where_they_can(arguments, module, config):
    command = parse_command_line(arguments)
    assert (command.module, command.config) == (module, config)


def test_a_flavor_of_several_modules_needs_its_module():
    with pytest.raises(UsageError, match="no configuration 'debugmodel'"):
        parse_command_line(["--config", "debugmodel"])


def test_every_module_has_the_debug_model_that_is_its_default():
    for module, configs in CATALOG.items():
        assert f"{module}_debugmodel" in configs


def test_underscores_and_hyphens_are_the_same_in_our_options():
    command = parse_command_line(["--dry_run", "--world_size", "8"])
    assert (command.action, command.world_size) == ("dry-run", 8)


@pytest.mark.parametrize(("ranks", "shown"), [("0", {0}), ("1,3", {1, 3}), ("all", {0, 1, 2, 3})])
def test_shown_ranks(ranks, shown):
    assert parse_command_line(["--nproc", "4", "--log-rank", ranks]).shown_ranks == shown


@pytest.mark.parametrize("flag", ["--help", "-h", "--list", "--version"])
def test_asking_for_information_wins_over_mistakes(flag):
    assert parse_command_line(["--module", "nonsense", "--nproc", "0", flag]).action == (
        "help" if flag == "-h" else flag.removeprefix("--")
    )


def test_an_unknown_module_is_refused_with_near_matches_and_the_list():
    assert refusal("--module", "lama3") == (
        "no module 'lama3'. Did you mean 'llama3'?\n"
        f"modules: {MODULES}; a Python module of yours; or hf:FOLDER"
    )


def test_a_model_of_torchtitans_is_found_by_its_name():
    command = parse_command_line(["--module", "gpt_oss", "--training.some_flag", "1"])
    assert (command.module, command.config) == ("gpt_oss", "gpt_oss_debugmodel")
    assert parse_command_line(["--module", "qwen3_5"]).config == "qwen35_debugmodel"
    command = parse_command_line(["--module", "gpt_oss", "--config", "gpt_oss_20b"])
    assert command.config == "gpt_oss_20b"


def test_an_unknown_configuration_of_torchtitans_is_refused_with_the_list():
    assert refusal("--module", "muse_glimmer", "--config", "nonsense") == (
        "module 'muse_glimmer' has no configuration 'nonsense'.\n"
        "configurations of muse_glimmer: muse_glimmer_debugmodel, muse_glimmer_debugmodel_mm, "
        "muse_glimmer_30b, muse_glimmer_30b_mm"
    )


def test_an_unknown_configuration_is_refused_with_near_matches_and_the_list():
    assert refusal("--module", "qwen3", "--config", "qwen3_debug") == (
        "module 'qwen3' has no configuration 'qwen3_debug'. Did you mean 'qwen3_debugmodel'?\n"
        "configurations of qwen3: qwen3_debugmodel, qwen3_moe_debugmodel, qwen3_14b"
    )


def test_a_configuration_of_another_module_is_refused_with_its_home():
    assert refusal("--module", "llama3", "--config", "qwen3_14b") == (
        "module 'llama3' has no configuration 'qwen3_14b'. It belongs to --module qwen3.\n"
        "configurations of llama3: llama3_debugmodel, llama3_debugmodel_flex_attn, llama3_8b, "
        "llama3_70b, llama3_405b, llama3_405b_pp"
    )


def test_an_unknown_configuration_without_a_module_is_looked_for_everywhere():
    text = refusal("--config", "llama_8b")
    assert text.startswith("no configuration 'llama_8b'. Did you mean 'llama3_8b'?\n")
    assert all(config in text for configs in CATALOG.values() for config in configs)


def test_a_module_of_the_users_needs_a_configuration():
    assert refusal("--module", "my.models") == (
        "--module my.models needs --config: a function in that module"
    )


def test_all_mistakes_are_reported_at_once():
    assert refusal(
        "--module", "lama3", "--nproc", "-2", "--world-size", "x", "--log-rank", "7", "--worldsize"
    ) == (
        "the command line has 5 problems:\n"
        "  1. no option '--worldsize'. Did you mean '--world-size'?\n"
        "  2. --nproc is '-2', and must be a positive integer\n"
        "  3. --world-size is 'x', and must be a positive integer\n"
        "  4. no module 'lama3'. Did you mean 'llama3'?\n"
        f"     modules: {MODULES}; a Python module of yours; or hf:FOLDER\n"
        "  5. --log-rank is '7', and must be 'all' or ranks from 0 to 0, separated by commas"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nproc"], "--nproc needs a value"),
        (["--nproc", "--dry-run"], "--nproc needs a value"),
        (["--nproc", "2", "--nproc", "3"], "--nproc is given twice"),
        (["--dry-run=yes"], "--dry-run takes no value, and was given 'yes'"),
        (
            ["--world-size", "4"],
            (
                "--world-size says how many ranks a --dry-run or precompile pretends to have. To "
                "start processes, use --nproc"
            ),
        ),
        (
            ["--nproc", "4", "--dry-run"],
            "--dry-run starts no processes, so --nproc means nothing: say --world-size",
        ),
        (
            ["precompile", "--nproc", "4", "--compile.artifacts=graphs"],
            "precompile starts no processes, so --nproc means nothing: say --world-size",
        ),
        (["precompile"], "precompile needs --compile.artifacts, the folder to write to"),
        (
            ["precompile", "--dry-run", "--compile.artifacts", "graphs"],
            "--dry-run stores nothing, and precompile does: leave out one",
        ),
        (
            ["--trace", "step.json"],
            (
                "--trace writes the step that a --dry-run simulates. To trace a run, use "
                "--profiler.enable_profiling"
            ),
        ),
        (
            ["--dry-run", "--trace", "no/such/step.json"],
            (
                "--trace is 'no/such/step.json', and must be a file in a folder that exists and can "
                "be written"
            ),
        ),
        (
            ["--timeline", "ranks.html"],
            "--timeline writes the schedule of a pipeline that a --dry-run simulates",
        ),
        (
            [
                "--parallelism.pipeline_parallel_balance=simulated",
                "--hardware",
                "no/such/mine.json",
            ],
            (
                "--hardware is 'no/such/mine.json', and must be a file, as "
                "benchmarks/calibrate_simulation.py writes them"
            ),
        ),
        (
            ["--dry-run", "--hardware", "no/such/mine.json"],
            (
                "--hardware is 'no/such/mine.json', and must be a file, as "
                "benchmarks/calibrate_simulation.py writes them"
            ),
        ),
        (["--training.step", "5"], "no flag '--training.step'. Did you mean '--training.steps'?"),
        (["--debug.no-determinstic"], MISSPELLED_SWITCH),
        (
            ["--module", "my/models.py", "--config", "tiny"],
            "--module my/models.py is a path: give the module, --module my.models",
        ),
        (["--dryrun"], "no option '--dryrun'. Did you mean '--dry-run'?"),
    ],
)
def test_misuse_of_our_options_is_refused(arguments, text):
    assert refusal(*arguments) == text


def test_nproc_inside_a_launched_job_is_refused():
    rendezvous = Rendezvous(
        rank=1,
        world_size=8,
        local_rank=1,
        local_world_size=8,
        master_addr="localhost",
        master_port=29500,
        source="torchrun",
    )
    check_launch(parse_command_line([]), rendezvous)
    check_launch(parse_command_line(["--nproc", "4"]), None)
    with pytest.raises(UsageError) as refused:
        check_launch(parse_command_line(["--nproc", "4"]), rendezvous)
    assert str(refused.value) == (
        "--nproc 4 starts local ranks, but this process already is rank 1 of 8 of a job started by "
        "torchrun: leave out one of the two"
    )
    with pytest.raises(UsageError) as refused:
        check_launch(parse_command_line(["--dry-run"]), rendezvous)
    assert str(refused.value) == (
        "--dry-run needs one process only, and this is rank 1 of 8 of a job started by torchrun"
    )
    with pytest.raises(UsageError, match=r"^precompile needs one process only"):
        check_launch(
            parse_command_line(["precompile", "--compile.artifacts", "graphs"]), rendezvous
        )


def test_precompile_is_the_first_word():
    command = parse_command_line(
        ["precompile", "--world-size", "4", "--compile.artifacts", "graphs"]
    )
    assert (command.action, command.world_size) == ("precompile", 4)
    assert command.overrides == ("--compile.artifacts", "graphs")
    later = parse_command_line(["--compile.artifacts", "precompile"])
    assert later.action == "train"


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--datset_path", "--dataloader.dataset_path"),
        ("--sequence_length", "--training.seq_len"),
        ("--memory-polcy", "--compile.memory_policy"),
        ("--trainig.stps", "--training.steps"),
        ("--learning_rate", "--optimizer.param_groups.0.optimizer_kwargs.lr"),
        ("--tp", "--parallelism.tensor_parallel_degree"),
        ("--fsdp", "--parallelism.data_parallel_shard_degree"),
        ("--compile.artifact", "--compile.artifacts"),
    ],
)
def test_the_nearest_of_all_flags_is_offered_with_or_without_its_group(flag: str, meant: str):
    first = refusal(flag, "3").partition("?")[0].split("Did you mean ")[1].split(" or ")[0]
    assert first == repr(meant)


def test_what_is_near_nothing_is_refused_without_a_guess():
    assert refusal("--xyzzy", "3") == "no flag '--xyzzy'."


def test_a_report_is_of_one_folder():
    command = parse_command_line(["report", "runs/first"])
    assert (command.action, command.folder) == ("report", Path("runs/first"))
    assert parse_command_line(["report", "--help"]).action == "help"


@pytest.mark.parametrize("rest", [[], ["--nproc", "2"], ["runs/first", "runs/second"]])
def test_a_report_of_anything_else_is_refused(rest: list[str]):
    assert refusal("report", *rest) == (
        "report takes the --dump_folder of a run and nothing else: gt-train report FOLDER"
    )


def test_only_matches_as_near_as_the_nearest_are_offered():
    known = ["--training.steps", "--training.dtype", "--training.seq_len"]
    assert did_you_mean("--training.step", known) == " Did you mean '--training.steps'?"
    assert did_you_mean("unlike", known) == ""


def test_the_help_fits_a_terminal_and_names_every_configuration():
    text = usage()
    # Descriptions come from the catalog, and may be longer.
    own_lines = text.partition("modules and configurations:")[0].splitlines()
    assert max(map(len, own_lines)) <= 90
    for configs in CATALOG.values():
        for name, entry in configs.items():
            assert name in text
            assert entry.description in listing()
