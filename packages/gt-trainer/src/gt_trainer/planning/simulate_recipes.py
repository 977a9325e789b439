"""Recipes as configurations of runs, simulated by the functions of a dry run."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from gt_config import ConfigError
from gt_passes.simulation import Hardware, Sensitivity
from gt_trace import flex_attention_on_cpu
from gt_trainer.device import intended_for
from gt_trainer.dry_run.captured_dry_step import (
    CapturedDryStep,
    capture_divided,
    capture_dry_step,
)
from gt_trainer.dry_run.fake_pipeline import planned_pipeline
from gt_trainer.dry_run.fake_step import fake_ranks, fake_step, meta_model
from gt_trainer.dry_run.simulated_step import SimulatedStep
from gt_trainer.dry_run.step_over_time import memory_over_step, step_timeline
from gt_trainer.planning.recipe_outcome import RecipeOutcome
from gt_trainer.planning.run_recipe import RunRecipe
from gt_trainer.preflight.preflight import check_configuration
from gt_trainer.preflight.settled_defaults import settle_defaults
from gt_trainer.quantization.quantized_model import with_quantized_model
from gt_trainer.trainer import GraphTrainer

Outcomes = tuple[RecipeOutcome, ...]
"""Outcomes of one recipe on each machine."""


def simulate_recipes(
    configs: Mapping[RunRecipe, GraphTrainer.Config],
    machines: Sequence[Hardware],
    *,
    trace_path: Path | None = None,
) -> list[Outcomes]:
    """Simulate recipes that have the same ``capture_key``.

    Args:
        configs: the configuration of each recipe, from ``recipe_config``; one or more.
        machines: to simulate each on.
        trace_path: where to write a Perfetto trace of the first recipe; None writes none.

    Raises:
        Exception: any error of building, placing or capturing.
    """
    with intended_for("cuda"), warnings.catch_warnings():
        # Captures run on this machine's CPU; the run will not.
        warnings.filterwarnings("ignore", message="In CPU autocast")
        ready = {
            recipe: with_quantized_model(unverified(config)) for recipe, config in configs.items()
        }
        found: list[Outcomes] = []
        with closing(_captured(ready)) as captured_steps:
            for recipe, captured in captured_steps:
                steps = []
                for machine in machines:
                    steps.append(captured.simulate(machine, trace_path=trace_path))
                    trace_path = None
                found.append(tuple(outcome_of(recipe, each) for each in steps))
        return found


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
    return replace(owner, **{name: inner})


def capture_key(recipe: RunRecipe) -> RunRecipe:
    """Equal for recipes that one capture serves: schedules of the same stages."""
    stages = {None: None, "1F1B": "1"}.get(recipe.schedule, "2")
    return replace(recipe, schedule=stages)


def unverified(config: GraphTrainer.Config) -> GraphTrainer.Config:
    """Verification changes no graph and takes its time; the run that is chosen does it."""
    return replace(config, compile=replace(config.compile, verify_passes=False))


def _captured(
    configs: Mapping[RunRecipe, GraphTrainer.Config],
) -> Generator[tuple[RunRecipe, CapturedDryStep]]:
    """Capture recipes, those with a pipeline once for all of their schedules.

    The fake ranks of a capture exist until the next recipe is captured.
    """
    captured: CapturedDryStep | None = None
    with flex_attention_on_cpu(), ExitStack() as ranks:
        for recipe, config in configs.items():
            if recipe.pp == 1:
                with fake_step(config, recipe.num_gpus) as step:
                    yield recipe, capture_dry_step(config, step)
                continue
            plan = planned_pipeline(config)
            if captured is None:
                ranks.enter_context(fake_ranks(recipe.num_gpus))
                captured = capture_divided(config, meta_model(config, recipe.num_gpus), plan)
            yield recipe, replace(captured, config=config, plan=plan)


def outcome_of(recipe: RunRecipe, step: SimulatedStep) -> RecipeOutcome:
    """Return what a plan says of a simulated step."""
    exposed = step.exposed_us
    if (schedule := step.schedule) is not None:
        exposed |= {
            "gathers and reductions": schedule.time.gathers,
            "transfers": schedule.time.transfers,
            "tied weight": schedule.shared_us,
        }
    return RecipeOutcome(
        recipe=recipe,
        step_us=step.step_us,
        tokens_per_second_per_gpu=step.tokens_per_second_per_gpu,
        mfu=step.mfu,
        computing_us=step.computing_us,
        exposed_us={purpose: us for purpose, us in exposed.items() if us > 0},
        bubble=step.bubble,
        optimizer_us=step.optimizer_us,
        memory=dict(step.fullest.peak.bytes_by_part),
        memory_over_step=memory_over_step(step),
        timeline=step_timeline(step),
        peak_bytes=step.peak_bytes,
        capacity_bytes=step.hardware.hbm_capacity_bytes,
        moved=_moved(step.sensitivity),
    )


def _moved(moves: Sensitivity) -> dict[str, float]:
    percent = f"{moves.fraction:.0%}"
    found = {}
    for each in moves.ranges:
        found[f"{each.group} {percent} faster"] = each.faster_us
        found[f"{each.group} {percent} slower"] = each.slower_us
    return found
