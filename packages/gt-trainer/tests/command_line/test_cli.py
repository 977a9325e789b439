"""The program ``gt-train`` as its user meets it, as far as no model is needed."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.config import ParallelismConfig

from gt_config import CompileConfig, ConfigError, Violation
from gt_trainer.__main__ import ending_at_once
from gt_trainer.command_line import cli
from gt_trainer.command_line.command_line import UsageError, usage
from gt_trainer.command_line.load_configuration import _with_own_folder
from gt_trainer.models.catalog import CATALOG
from gt_trainer.models.torchtitan_modules import torchtitan_modules
from gt_trainer.quantization.quantization_options import QuantizationConfig
from gt_trainer.trainer import GraphTrainer

MANY_MODULES = 350
"""Of 4,500 that a run imports; Python's own, and ours that need no others, are some 230."""

JOB = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def outside_any_job(monkeypatch):
    for name in (*JOB, "SLURM_PROCID", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--list"],
        ["--version"],
        ["--module", "lama3"],
        ["--config", "llama3_9b"],
        ["--nproc", "0"],
        ["--training.stps", "3"],
        ["--training.steps", "many"],
        ["--training.steps", "-3"],
        ["--nproc", "4", "--parallelism.tensor_parallel_degree", "3"],
        ["--dry-run", "--compile.passes", "nonsense"],
        ["--compile.mode", "none", "--compile.prefetch_layers", "3"],
        ["report", "no/such/folder"],
    ],
    ids=" ".join,
)
def test_information_and_what_is_wrong_by_itself_cost_no_import_of_torch(arguments):
    program = (
        "import sys\n"
        "from gt_trainer.command_line.cli import main\n"
        f"main({arguments!r})\n"
        "heavy = {'torch', 'torchtitan', 'numpy', 'tyro', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        f"assert len(sys.modules) < {MANY_MODULES}, len(sys.modules)\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr


def test_help_is_printed_and_succeeds(capsys):
    assert cli.main(["--help"]) == 0
    assert capsys.readouterr() == (usage(), "")


def test_the_version_is_that_of_everything_that_decides_a_run(capsys):
    assert cli.main(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "gt-trainer",
        "gt-pipeline",
        "gt-autoparallel",
        "gt-passes",
        "gt-trace",
        "gt-config",
        "torch",
        "torchtitan",
    ]


def test_bad_input_is_one_message_and_status_2(capsys):
    assert cli.main(["--module", "lama3"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        "gt-train: no module 'lama3'. Did you mean 'llama3'?\n"
        f"modules: {', '.join([*CATALOG, *torchtitan_modules()])}; a Python module of yours; "
        "or hf:FOLDER\n"
    )


def test_an_incomplete_job_is_bad_input(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert cli.main([]) == 2
    assert capsys.readouterr().err.startswith(
        "gt-train: the environment has RANK but lacks WORLD_SIZE, LOCAL_RANK, MASTER_ADDR"
    )


def test_one_voice_a_machine_tells_of_bad_input(capsys, monkeypatch):
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["--module", "lama3"]) == 2
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_stops_reading_is_no_error():
    finished = subprocess.run(
        f"{sys.executable} -m gt_trainer --help | head -n 0",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (finished.stdout, finished.stderr) == ("", "")


@pytest.mark.parametrize("where", ["gt_trainer.command_line.cli", "torch"])
def test_ctrl_c_before_training_ends_at_once_whatever_is_being_imported(where):
    program = f"""
        import os, signal, sys

        class Importing:
            def find_spec(self, name, path=None, target=None):
                if name != {where!r}:
                    return None
                try:  # as callbacks and foreign modules do
                    os.kill(os.getpid(), signal.SIGINT)
                except BaseException:
                    print("swallowed")

        sys.meta_path.insert(0, Importing())
        from gt_trainer.__main__ import main
        sys.argv = ["gt-train", "--dry-run"]
        sys.exit(main())
    """
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "GT_DEVICE": "cpu"},
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == (
        130,
        "",
        "gt-train: interrupted\n",
    )


def test_ctrl_c_is_left_alone_where_something_outside_python_handles_it(monkeypatch):
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ending_at_once(), pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, handler)


def test_ctrl_c_is_left_alone_where_it_is_ignored():
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ending_at_once():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, previous)


def test_imports_are_done_without_collecting_garbage_and_stay_exempt_from_it():
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    with cli._without_garbage_collection():
        assert not gc.isenabled()
        made = [[] for _ in range(10)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(made)


@pytest.mark.parametrize(
    ("chosen", "own"),
    [("./outputs", "outputs/tiny"), ("runs", "runs")],
)
def test_a_configuration_has_a_dump_folder_of_its_own_unless_it_chose_one(chosen, own):
    config = _with_own_folder(GraphTrainer.Config(dump_folder=chosen), "tiny")
    assert config.dump_folder == own


@pytest.fixture
def no_models(monkeypatch):
    """Replace what needs a model: the configuration, its check, and the work."""
    config = SimpleNamespace(
        dump_folder="out",
        training=SimpleNamespace(steps=2),
        checkpoint=CheckpointManager.Config(enable=True),
        parallelism=ParallelismConfig(),
        compile=CompileConfig(),
        model_spec=None,
        dataloader=None,
        validator=SimpleNamespace(enable=False),
        quantization=QuantizationConfig(),
    )
    checks = []
    monkeypatch.setattr(cli, "load_configuration", lambda command: config)
    monkeypatch.setattr(
        "gt_trainer.command_line.overrides.apply_overrides", lambda config, flags: config
    )
    monkeypatch.setattr(
        "gt_trainer.preflight.preflight.check_configuration",
        lambda config, world_size, *, typed, **options: checks.append((world_size, options)),
    )
    monkeypatch.setattr(
        "gt_trainer.preflight.settled_defaults.settle_defaults",
        lambda config, world_size, *, asked: (config, ()),
    )
    monkeypatch.setattr(
        "gt_trainer.preflight.settled_defaults.describe_run",
        lambda config, world_size: f"a run of {world_size}",
    )
    for name in (*JOB, "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return checks


def test_a_finished_run_says_where_its_results_are(capsys, monkeypatch, tmp_path, no_models):
    monkeypatch.chdir(tmp_path)

    def train(config, *, by_hand, hardware):
        checkpoint = Path(config.dump_folder, "checkpoint", "step-2")
        checkpoint.mkdir(parents=True)
        (checkpoint / ".metadata").touch()
        Path(config.dump_folder, "metrics.jsonl").touch()

    monkeypatch.setattr("gt_trainer.run.train", train)
    assert cli.main([]) == 0
    assert capsys.readouterr().out == (
        "gt-train: a run of 1\ngt-train: finished 2 steps\n"
        "  metrics:    out/metrics.jsonl\n"
        "  checkpoint: out/checkpoint/step-2\n"
    )
    assert no_models == [(1, {"num_local_ranks": 1})]


@pytest.mark.parametrize("last_save", ["full", "model_only", "in_hf"])
def test_a_run_without_steps_left_says_how_to_train_on_from_what_it_saved(
    capsys, monkeypatch, tmp_path, no_models, last_save
):
    monkeypatch.chdir(tmp_path)
    newest = tmp_path / "out" / "checkpoint" / "step-3"
    if last_save == "in_hf":
        newest.mkdir(parents=True)
        (newest / "model.safetensors.index.json").touch()
    else:
        state = {"optimizer": {"lr": 1.0}, "train_state": {"step": 3}}
        saved = {"weight": torch.ones(3), **(state if last_save == "full" else {})}
        dcp.save(saved, checkpoint_id=newest, no_dist=True)
    weights = f"--checkpoint.initial_load_path {newest}"
    train_on = {
        "full": "--training.steps 5",
        "model_only": f"{weights}, and --dump_folder as below",
        "in_hf": f"{weights} --checkpoint.initial_load_in_hf, and --dump_folder as below",
    }
    assert cli.main([]) == 0
    assert capsys.readouterr().err == (
        "gt-train: nothing to do: out/checkpoint/step-3 is of step 3, and --training.steps is 2.\n"
        f"  To train on:    {train_on[last_save]}\n"
        "  To start anew:  --dump_folder with a folder that holds no checkpoint\n"
    )


def test_a_failed_run_is_status_1(capsys, monkeypatch, no_models):
    def train(config, *, by_hand, hardware):
        raise ValueError("no such thing")

    monkeypatch.setattr("gt_trainer.run.train", train)
    assert cli.main([]) == 1
    shown = capsys.readouterr()
    assert shown.out == "gt-train: a run of 1\n"
    assert shown.err.endswith("gt-train: failed: ValueError: no such thing\n")


def test_precompile_prints_its_report_for_the_world_size_asked_for_or_intended(
    capsys, monkeypatch, no_models
):
    monkeypatch.setattr(
        "gt_trainer.precompile.precompile.precompile",
        lambda config, world_size, *, hardware: world_size * 10,
    )
    asked = ["precompile", "--compile.artifacts", "graphs"]
    assert cli.main([*asked, "--world-size", "6"]) == 0
    assert cli.main([*asked, "--config", "llama3_70b"]) == 0
    assert capsys.readouterr() == ("gt-train: a run of 6\n60\ngt-train: a run of 256\n2560\n", "")


def test_a_dry_run_prints_its_report_for_the_world_size_and_machine_asked_for_or_intended(
    capsys, monkeypatch, no_models, tmp_path
):
    monkeypatch.setattr(
        "gt_trainer.dry_run.dry_run.dry_run",
        lambda config, world_size, *, by_hand, hardware, trace_path, timeline_path, is_allowed: (
            world_size * 100,
            trace_path and str(trace_path),
            *([] if hardware is None else [hardware.name]),
            *([] if by_hand is None else ["by hand"]),
        ),
    )
    assert cli.main(["--dry-run", "--world-size", "6"]) == 0
    assert cli.main(["--dry-run", "--config", "llama3_70b", "--trace", "step.json"]) == 0
    assert capsys.readouterr() == (
        "gt-train: a run of 6\n(600, None)\ngt-train: a run of 256\n(25600, 'step.json')\n",
        "",
    )
    assert no_models == [(6, {"will_train": False}), (256, {"will_train": False})]
    mine = tmp_path / "mine.json"
    published = resources.files("gt_passes.simulation").joinpath("h100_sxm.json").read_text("utf-8")
    mine.write_text(published.replace('"H100 SXM"', '"mine"'))
    assert cli.main(["--dry-run", "--world-size", "6", "--hardware", str(mine)]) == 0
    assert capsys.readouterr().out.endswith("\n(600, None, 'mine')\n")


def test_a_timeline_is_of_a_pipeline(capsys, no_models, tmp_path):
    assert cli.main(["--dry-run", "--timeline", str(tmp_path / "ranks.html")]) == 2
    assert capsys.readouterr().err == (
        "gt-train: --timeline draws the ranks of a pipeline, and "
        "--parallelism.pipeline_parallel_degree is 1: use --trace\n"
    )


def test_hardware_is_of_runs_that_balance_stages_or_plan(capsys, no_models, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text("{}")
    flag = "--parallelism.pipeline_parallel_balance"
    for options in ([], [flag, "layers"]):
        assert cli.main([*options, "--hardware", str(path)]) == 2
        assert capsys.readouterr().err == (
            "gt-train: --hardware is the machine that a --dry-run simulates, by which "
            f"{flag} simulated divides a pipeline, or that --compile.autoparallel plans for\n"
        )


def test_a_dry_run_refuses_a_hardware_file_that_is_none(capsys, no_models, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text("{}")
    assert cli.main(["--dry-run", "--hardware", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"gt-train: --hardware {path}: no hardware data: JSON with name, fixed_on and constants, "
        "each an object, as h100_sxm.json has\n"
    )


def test_what_the_configuration_breaks_is_bad_input(capsys, monkeypatch, no_models):
    def refuse(config, world_size, **options):
        raise ConfigError([Violation(flag="--a", value=1, allowed="2", fix="use 2")])

    monkeypatch.setattr("gt_trainer.preflight.preflight.check_configuration", refuse)
    assert cli.main([]) == 2
    assert capsys.readouterr().err == (
        "gt-train: the configuration has 1 problem:\n"
        "  1. --a is 1\n"
        "     allowed: 2\n"
        "     fix: use 2\n"
    )


def test_a_module_of_the_users_is_imported_and_judged(capsys, monkeypatch, tmp_path):
    # It would take the root logger from pytest.
    monkeypatch.setattr("torchtitan.tools.logging.init_logger", lambda: None)
    (tmp_path / "my_models").mkdir()
    (tmp_path / "my_models" / "tiny.py").write_text("def tiny():\n    return 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["--module", "my_models.tiny", "--config", "tini"]) == 2
    assert cli.main(["--module", "my_models.tiny", "--config", "tiny"]) == 2
    assert cli.main(["--module", "my_models.small", "--config", "tiny"]) == 2
    (tmp_path / "my_models" / "poor.py").write_text("import no_such\n")
    assert cli.main(["--module", "my_models.poor", "--config", "tiny"]) == 2
    (tmp_path / "my_models" / "wrong.py").write_text(
        "from os import abort\ndef sized(size):\n    pass\ndef tiny():\n    return 1 / 0\n"
    )
    for name in ("abort", "sized", "tiny"):
        assert cli.main(["--module", "my_models.wrong", "--config", name]) == 2
    (tmp_path / "my_models" / "broken.py").write_text("1 / 0\n")
    assert cli.main(["--module", "my_models.broken", "--config", "tiny"]) == 2
    assert cli.main(["--module", "os", "--config", "abort"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "gt-train: module 'my_models.tiny' has no function 'tini'. Did you mean 'tiny'?",
        "gt-train: my_models.tiny.tiny returned 3, which is no configuration of a trainer",
        "gt-train: --module my_models.small: there is no Python module 'my_models.small'",
        "gt-train: --module my_models.poor: it needs the Python module 'no_such', which is not there",
        *(
            f"gt-train: my_models.wrong.{name} is no function in Python that takes no arguments "
            "and returns a configuration."
            for name in ("abort", "sized")
        ),
        (
            "gt-train: my_models.wrong.tiny() failed: ZeroDivisionError: division by zero "
            f"({tmp_path}/my_models/wrong.py:5)"
        ),
        (
            "gt-train: --module my_models.broken cannot be imported: ZeroDivisionError: division "
            f"by zero ({tmp_path}/my_models/broken.py:1)"
        ),
        "gt-train: --module os is of Python's standard library, which has no configurations",
    ]


def test_modules_of_the_current_folder_are_found_by_an_installed_program(tmp_path):
    here, elsewhere = tmp_path / "here", tmp_path / "bin"
    for folder in (here, elsewhere):
        folder.mkdir()
    (here / "my_models.py").write_text("print('imported')\n")
    program = elsewhere / "gt-train"  # as pip writes it
    program.write_text(
        "import sys\n"
        "from gt_trainer.__main__ import main\n"
        "sys.argv[1:] = ['--version']\n"
        "main()\n"
        "import my_models\n"
    )
    finished = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False, cwd=here
    )
    assert finished.stdout.endswith("\nimported\n"), finished.stderr


def test_what_torchtitan_trains_otherwise_is_refused_with_the_reasons(capsys, monkeypatch):
    monkeypatch.setattr("torchtitan.tools.logging.init_logger", lambda: None)
    assert cli.main(["--module", "flux", "--config", "flux_debugmodel"]) == 2
    assert capsys.readouterr().err == (
        "gt-train: torchtitan.models.flux.config_registry.flux_debugmodel cannot be trained here: it "
        "is a FluxTrainer.Config, whose trainer reads encoder, inference; Graph Trainer replaces "
        "torchtitan's common Trainer alone; its model is FluxModel, which is no Decoder of "
        "torchtitan's: a step is captured from tokens to logits\n"
    )


def test_report_writes_a_page_into_the_folder_and_says_where(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5, "grad_norm": 1.0}\n')
    assert cli.main(["report", str(tmp_path)]) == 0
    path = tmp_path / "report.html"
    assert capsys.readouterr().out == f"{path}\n"
    assert "<h1>Run " in path.read_text()


def test_a_report_of_no_run_is_bad_input(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"gt-train: {str(tmp_path)!r} has no metrics.jsonl")


def _shell(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    program = f"{sys.executable} -m gt_trainer"
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command.replace('gt-train', program)}"],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **variables},
        check=False,
    )


@pytest.mark.parametrize("command", ["--help >&-", "--list >&- 2>&- <&-", "--help | head -n 1"])
def test_an_output_that_is_closed_is_no_error(command, tmp_path):
    finished = _shell(f"gt-train {command}", tmp_path)
    assert (finished.returncode, finished.stderr) == (0, "")


def test_names_that_a_locale_cannot_write_are_escaped(tmp_path):
    written = Path(__file__).parent.parent / "report" / "written_run"
    shutil.copytree(written, tmp_path / "Läufe")
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    finished = _shell("gt-train report L*", tmp_path, **ascii_alone)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout == "L\\xe4ufe/report.html\n"
    refused = _shell("gt-train --stepz 3", tmp_path, **ascii_alone)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "Traceback" not in refused.stderr
    assert (tmp_path / "Läufe" / "report.html").is_file()


@pytest.mark.parametrize("name", ["metrics.jsonl", "starts.jsonl", "validation.jsonl"])
def test_histories_that_are_none_are_refused_before_a_run_starts(name, tmp_path):
    (tmp_path / name).write_text('{"step": 1, "time": 0}\ngarbage\n')
    with pytest.raises(
        UsageError, match=rf"{name}', line 2 is not a metrics record: 'garbage'; mo"
    ):
        cli._check_histories(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match=rf"{name}' \(it is no regular file\); choose another"):
        cli._check_histories(tmp_path)
