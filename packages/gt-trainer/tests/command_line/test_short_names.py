"""Short names stand for flags, wherever these are typed."""

import pytest

from gt_trainer.command_line.command_line import (
    UsageError,
    flags_given,
    parse_command_line,
    usage,
)
from gt_trainer.command_line.known_flags import SHORT_NAMES, known_settings
from gt_trainer.models.catalog import CATALOG


def test_a_short_name_is_its_flag():
    short = parse_command_line(["--steps", "3", "--lr=0.1", "--batch", "2", "--seq_len", "64"])
    assert short.overrides == (
        "--training.steps",
        "3",
        "--optimizer.param_groups.0.optimizer_kwargs.lr=0.1",
        "--training.local_batch_size",
        "2",
        "--training.seq_len",
        "64",
    )
    assert flags_given(short.overrides) == frozenset(SHORT_NAMES.values())


def test_every_configuration_has_the_flags_that_have_short_names():
    for configs in CATALOG.values():
        for name in configs:
            assert set(SHORT_NAMES.values()) <= set(known_settings(name).values), name


def test_short_names_are_shown_first():
    shown = usage()
    for short, flag in SHORT_NAMES.items():
        assert f"\n  {short} " in shown
        assert f"({flag})" in shown
    assert shown.index("\n  --seq-len N") < shown.index("\n  --module NAME")


@pytest.mark.parametrize(
    ("typed", "meant"), [("--step", "--steps"), ("--batchs", "--batch"), ("--seqlen", "--seq-len")]
)
def test_a_misspelt_short_name_is_told(typed, meant):
    with pytest.raises(UsageError, match=f"no option '{typed}'. Did you mean .*'{meant}'"):
        parse_command_line([typed, "3"])
