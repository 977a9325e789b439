"""The program ``gt-train`` as its user meets it, as far as no model is needed."""

import subprocess
import sys

import pytest

from gt_trainer import cli
from gt_trainer.command_line import usage

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
    ],
    ids=" ".join,
)
def test_information_and_misspelled_names_cost_no_import_of_torch(arguments):
    program = (
        "import sys\n"
        "from gt_trainer.cli import main\n"
        f"main({arguments!r})\n"
        "heavy = {'torch', 'torchtitan', 'numpy', 'tyro', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
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
        "modules: llama3, qwen3, deepseek_v3; or the dotted path of a module of yours\n"
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


def test_ctrl_c_before_training_is_one_message(capsys, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_load_configuration", interrupt)
    assert cli.main([]) == 130
    assert capsys.readouterr() == ("", "gt-train: interrupted before training started\n")
