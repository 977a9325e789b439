"""A recipe as the configuration that ``gt-train`` would make of its flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from gt_config import ConfigError
from gt_trainer.planning.run_recipe import RunRecipe
from gt_trainer.preflight.preflight import check_configuration
from gt_trainer.preflight.settled_defaults import settle_defaults
from gt_trainer.trainer import GraphTrainer


def recipe_config(
    base: GraphTrainer.Config, recipe: RunRecipe, *, asked: Collection[str] = ()
) -> GraphTrainer.Config:
    """The configuration of a run by ``recipe``, with the device's defaults settled.

    Args:
        base: with the flags that every recipe has. Not changed.
        recipe: sets the other flags.
        asked: the flags of ``base`` that the user gave.

    Raises:
        ConfigError: a run cannot have it; lists what is wrong.
    """
    config = base
    for flag, value in recipe.settings().items():
        config = _with_value(config, flag.removeprefix("--").split("."), value)
    config, _ = settle_defaults(config, recipe.num_gpus, asked={*asked, *recipe.settings()})
    check_configuration(config, recipe.num_gpus, will_train=False)
    return config


def refusal(error: ConfigError) -> str:
    """Return the first rule that a recipe breaks, as text."""
    first = error.violations[0]
    return f"{first.flag} {first.value!r}: allowed is {first.allowed}"


def _with_value(owner: Any, path: list[str], value: object) -> Any:
    name, *rest = path
    inner = _with_value(getattr(owner, name), rest, value) if rest else value
    return dataclasses.replace(owner, **{name: inner})
