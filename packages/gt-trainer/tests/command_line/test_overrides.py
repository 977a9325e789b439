"""Flags of the configuration: what tyro accepts, and what is said of what it does not."""

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from gt_trainer.command_line.command_line import UsageError
from gt_trainer.command_line.overrides import apply_overrides, flags_in, help_text


@dataclass(frozen=True, kw_only=True)
class Training:
    steps: int = 20
    """How many steps."""
    seq_len: int = 256
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if self.steps == 13:
            raise ValueError("13 steps bring bad luck")
        assert self.seq_len > 0, "a sequence has tokens"  # as torchtitan does here and there


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Compile:
    passes: tuple[str, ...] = ()
    verify: bool = True


@dataclass(frozen=True, kw_only=True)
class Config:
    """A small configuration."""

    # A comment is for nobody who asks for help.
    dump_folder: str = "out"
    training: Training = field(default_factory=Training)
    optimizers: list[Optimizer] = field(
        default_factory=lambda: [Optimizer(name="AdamW", arguments={"lr": 1e-3})]
    )
    compile: Compile = field(default_factory=Compile)


def refusal(*arguments: str) -> str:
    with pytest.raises(UsageError) as refused:
        apply_overrides(Config(), arguments)
    return str(refused.value)


def test_no_flags_change_nothing():
    assert apply_overrides(Config(), []) == Config()


def test_flags_change_what_they_name_and_keep_the_configurations_own_defaults():
    own = Config(training=Training(steps=7))
    changed = apply_overrides(own, ["--training.seq_len", "64", "--dump-folder=here"])
    assert changed == Config(training=Training(steps=7, seq_len=64), dump_folder="here")


def test_names_are_separated_by_commas():
    assert apply_overrides(Config(), ["--compile.passes", "a,b-c"]).compile.passes == ("a", "b-c")
    assert apply_overrides(Config(), ["--compile.passes", ""]).compile.passes == ()


def test_switches_have_a_negative_form():
    assert not apply_overrides(Config(), ["--compile.no-verify"]).compile.verify
    assert not apply_overrides(Config(), ["--compile.no_verify"]).compile.verify


def test_all_unknown_flags_are_named_with_near_matches():
    assert refusal("--training.step", "5", "--training.seq_len", "8", "--compil.passes=a") == (
        "the command line has 2 problems:\n"
        "  1. no flag '--training.step'. Did you mean '--training.steps'?\n"
        "  2. no flag '--compil.passes'. Did you mean '--compile.passes'?\n"
        "     gt-train --help-all lists every flag"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--training.steps", "many"],
            "Error parsing --training.steps: invalid literal for int() with base 10: 'many'",
        ),
        (
            ["--training.dtype", "int8"],
            (
                "invalid choice 'int8' for argument '--training.dtype'. "
                "Expected one of ('float32', 'bfloat16')."
            ),
        ),
        (["--training.steps"], "Missing value for argument '--training.steps'. Expected 1 values."),
        (["--training.steps", "13"], "Error parsing training: 13 steps bring bad luck"),
        (
            ["--compile.verify", "True"],
            "unexpected 'True'. A switch takes no value: --GROUP.FLAG or --GROUP.no_FLAG.",
        ),
        (["train"], "unexpected 'train'."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_value_that_does_not_fit_is_said_in_plain_text(arguments, text):
    assert refusal(*arguments) == f"{text}\ngt-train --help-all lists every flag"


def test_what_a_configuration_asserts_is_bad_input_too():
    assert "a sequence has tokens" in refusal("--training.seq_len", "0")


def test_the_full_help_shows_every_flag_with_its_default_and_no_comment():
    text = help_text(Config(training=Training(steps=7)))
    assert [*flags_in(text)] == [
        "--help",
        "--dump_folder",
        "--training.steps",
        "--training.seq_len",
        "--training.dtype",
        "--optimizers.0.name",
        "--optimizers.0.arguments.lr",
        "--compile.passes",
        "--compile.verify",
        "--compile.no_verify",
    ]
    assert text.startswith("usage: gt-train")
    assert "How many steps. (default: 7)" in text
    assert "nobody" not in text


def test_items_of_lists_are_set_by_their_number():
    changed = apply_overrides(Config(), ["--optimizers.0.arguments.lr", "1e-4"])
    assert changed.optimizers == [Optimizer(name="AdamW", arguments={"lr": 1e-4})]
    assert refusal("--optimizers.0.arguments.lrs", "1") == (
        "no flag '--optimizers.0.arguments.lrs'. Did you mean '--optimizers.0.arguments.lr'?\n"
        "gt-train --help-all lists every flag"
    )


def test_torchtitans_experiments_are_not_imported():
    program = (
        "import sys\n"
        "from dataclasses import dataclass\n"
        "from gt_trainer.command_line.overrides import apply_overrides\n"
        "@dataclass\n"
        "class Config:\n"
        "    steps: int = 1\n"
        "assert apply_overrides(Config(), ['--steps', '2']).steps == 2\n"
        "assert not [name for name in sys.modules if 'experiments' in name]\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
