"""The table of flags that lets mistakes be found, and help be shown, without importing torch."""

import importlib.metadata
import json

import pytest

from gt_trainer.command_line.known_flags import TABLE, explain_flags
from gt_trainer.command_line.overrides import apply_overrides, flags_in, help_text
from gt_trainer.command_line.write_known_flags import make_table
from gt_trainer.models.llama3 import llama3_debugmodel

LEARNING_RATE = "--optimizer.param_groups.0.optimizer_kwargs.lr"


def test_the_table_is_that_of_the_configurations_as_they_are():
    recorded = json.loads(TABLE.read_text())
    for name in ("torchtitan", "tyro"):
        if importlib.metadata.version(name) != recorded[name]:
            pytest.skip(f"the table was made with another {name}")
    assert TABLE.read_text() == make_table(), (
        "write it anew: python -m gt_trainer.command_line.write_known_flags"
    )


def test_misspelled_flags_are_named_once_with_near_matches():
    arguments = ["--training.step", "3", "--training.steps=4", "--training.step=5", "--nonsense"]
    assert explain_flags(arguments) == [
        "no flag '--training.step'. Did you mean '--training.steps'?",
        "no flag '--nonsense'.",
    ]


@pytest.mark.parametrize("guess", ["--lr", "--optimizer.lr", "--training.lr"])
def test_a_flag_of_the_same_name_in_another_group_is_offered(guess):
    assert explain_flags([guess, "1e-4"]) == [f"no flag {guess!r}. Did you mean {LEARNING_RATE!r}?"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--training.steps", "many"], "--training.steps is 'many', and must be an integer"),
        (
            ["--quantization.linears", "nvfp4"],
            (
                "--quantization.linears is 'nvfp4', and must be 'none', 'float8_tensorwise', "
                "'float8_rowwise', 'float8_rowwise_with_gw_hp' or 'mxfp8'. torchtitan's NVFP4 layer "
                "runs on Blackwell GPUs alone, is placed by its backend spmd_types alone, and cannot "
                "be emulated"
            ),
        ),
        (["--training.seq-len=1e3"], "--training.seq_len is '1e3', and must be an integer"),
        ([LEARNING_RATE, "fast"], f"{LEARNING_RATE} is 'fast', and must be a number"),
        (
            ["--compile.offload_host_gib", "no"],
            "--compile.offload_host_gib is 'no', and must be 'None' or a number",
        ),
        (
            ["--compile.mode", "aot_joit"],
            (
                "--compile.mode is 'aot_joit', and must be 'none', 'aot_fx_trace' or 'aot_joint'. "
                "Did you mean 'aot_joint'?"
            ),
        ),
        (["--training.steps"], "--training.steps needs a value"),
        (["--training.steps", "--nproc"], "--training.steps needs a value"),
        (
            ["--compile.verify_passes", "True"],
            (
                "--compile.verify_passes takes no value, and was given 'True': "
                "--GROUP.FLAG or --GROUP.no_FLAG"
            ),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_value_that_does_not_fit_is_refused(arguments, text):
    assert explain_flags(arguments)[0] == text


@pytest.mark.parametrize(
    "arguments",
    [
        ["--checkpoint.load_step", "-1"],
        ["--training.max_norm", "inf"],
        ["--compile.offload_host_gib", "None"],
        ["--compile.passes", "a,b"],
        ["--optimizer.param_groups.0.optimizer_kwargs.betas", "0.9", "0.99"],
        ["--checkpoint.no_enable", "activation_checkpoint:none"],
        ["activation_checkpoint:full", "--activation_checkpoint.debug"],
    ],
    ids=" ".join,
)
def test_a_value_that_fits_is_left_for_tyro(arguments):
    assert explain_flags(arguments) == []


def test_every_flag_that_the_help_shows_is_accepted():
    assert LEARNING_RATE in flags_in(help_text(llama3_debugmodel()))
    assert not explain_flags([LEARNING_RATE, "1e-4"])
    changed = apply_overrides(llama3_debugmodel(), [LEARNING_RATE, "1e-4"])
    assert changed.optimizer.param_groups[0].optimizer_kwargs["lr"] == 1e-4


def test_nothing_is_known_of_another_torchtitan(monkeypatch):
    monkeypatch.setattr("gt_trainer.command_line.known_flags._table", lambda: None)
    assert explain_flags(["--nonsense"]) == []


def test_lists_of_lists_are_left_to_tyro():
    """Their help has braces, and is no choice."""
    flag = "--parallelism.module_fqns_per_model_part"
    assert explain_flags([flag, "tok_embeddings,layers.0", "layers.1,norm,lm_head"]) == []
