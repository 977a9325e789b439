"""A recipe's flags: what they say, and that typing them gives the configuration it stands for."""

from dataclasses import replace

import pytest

from gt_config import ConfigError
from gt_trainer.command_line.overrides import apply_overrides
from gt_trainer.device import intended_for
from gt_trainer.models.llama3 import llama3_debugmodel
from gt_trainer.planning.run_recipe import RunRecipe
from gt_trainer.planning.simulate_recipes import recipe_config
from gt_trainer.preflight.settled_defaults import settle_defaults

_PIPELINE = RunRecipe(
    dp_shard=2,
    pp=2,
    schedule="Interleaved1F1B",
    microbatch=2,
    global_batch=16,
    memory_policy="full_recompute",
)
_STEPS = RunRecipe(
    dp_shard=2,
    dp_replicate=2,
    tp=2,
    microbatch=1,
    global_batch=16,
    memory_policy="selective",
    reduces_once=True,
)


@pytest.mark.parametrize("recipe", [_PIPELINE, _STEPS], ids=["pipeline", "step"])
def test_typing_the_flags_gives_the_configuration_that_was_simulated(recipe):
    with intended_for("cuda"):
        planned = recipe_config(llama3_debugmodel(), recipe)
        typed = apply_overrides(llama3_debugmodel(), recipe.flags())
        asked = recipe.settings()
        settled, _ = settle_defaults(typed, recipe.num_gpus, asked=asked)
    for group in ("parallelism", "training", "compile", "quantization"):
        assert getattr(planned, group) == getattr(settled, group)


def test_counts_follow_from_degrees_and_batch():
    assert _PIPELINE.num_gpus == 4
    assert (_PIPELINE.sequences, _PIPELINE.num_microbatches) == (8, 4)
    assert (_STEPS.num_gpus, _STEPS.num_microbatches) == (8, 4)


def test_a_recipe_is_told_in_short():
    assert str(_PIPELINE) == "dp_shard 2 x pp 2 | 4 x 2 seq Interleaved1F1B full_recompute"
    assert str(_STEPS) == "dp_replicate 2 x dp_shard 2 x tp 2 | 4 x 1 seq selective reduce once"


def test_a_command_line_has_what_every_recipe_has_first():
    command = _STEPS.command("--config llama3_8b", further=("--training.seq_len", "4096"))
    assert command.startswith("gt-train --config llama3_8b --training.seq_len 4096 --parallelism.")
    assert "--compile.ep_overlap.no_enabled" in command


def test_what_a_run_cannot_have_is_refused_by_its_own_rules():
    with (
        intended_for("cuda"),
        pytest.raises(ConfigError, match="expert_parallel_degree"),
    ):
        recipe_config(llama3_debugmodel(), replace(_STEPS, ep=2))
