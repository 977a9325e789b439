"""The table of flags that lets a misspelled one be found without importing torch."""

import importlib.metadata
import json

import pytest

from gt_trainer.command_line.known_flags import TABLE, explain_unknown_flags, make_table


def test_the_table_is_that_of_the_configurations_as_they_are():
    recorded = json.loads(TABLE.read_text())
    if importlib.metadata.version("torchtitan") != recorded["torchtitan"]:
        pytest.skip("the table is of another torchtitan, and is not consulted with this one")
    assert TABLE.read_text() == make_table(), (
        "write it anew: python -m gt_trainer.command_line.known_flags"
    )


def test_misspelled_flags_are_named_once_with_near_matches():
    arguments = ["--training.step", "3", "--training.steps=4", "--training.step=5", "--nonsense"]
    assert explain_unknown_flags(arguments) == [
        "no flag '--training.step'. Did you mean '--training.steps'?",
        "no flag '--nonsense'.",
    ]
