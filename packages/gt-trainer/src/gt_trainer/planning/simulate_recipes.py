"""Recipes as configurations of runs, simulated by the functions of a dry run."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gt_config import ConfigError
from gt_passes.simulation import Hardware, Sensitivity
from gt_trace import flex_attention_on_cpu
from gt_trainer.device import intended_for
from gt_trainer.dry_run.captured_dry_step import capture_dry_step
from gt_trainer.dry_run.fake_pipeline import capture_divided, planned_pipeline
from gt_trainer.dry_run.fake_step import fake_ranks, fake_step, meta_model
from gt_trainer.dry_run.memory_over_step import memory_of_pipeline, memory_of_run
from gt_trainer.dry_run.pipeline_dry_run import simulate_captured
from gt_trainer.dry_run.simulated_pipeline import SimulatedPipeline
from gt_trainer.dry_run.simulated_run import SimulatedRun
from gt_trainer.dry_run.step_timeline import timeline_of_pipeline, timeline_of_run
from gt_trainer.planning.recipe_outcome import RecipeOutcome
from gt_trainer.planning.run_recipe import RunRecipe
from gt_trainer.preflight.preflight import check_configuration
from gt_trainer.preflight.settled_defaults import settle_defaults
from gt_trainer.quantization.quantized_model import with_quantized_model
from gt_trainer.startup import StartupClock
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
        is_pipelined = next(iter(configs)).pp > 1
        simulate = _simulate_pipelines if is_pipelined else _simulate_steps
        return list(simulate(ready, machines, trace_path))


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


def _simulate_steps(
    configs: Mapping[RunRecipe, GraphTrainer.Config],
    machines: Sequence[Hardware],
    trace_path: Path | None,
) -> Iterator[Outcomes]:
    for recipe, config in configs.items():
        with fake_step(config, recipe.num_gpus) as step, flex_attention_on_cpu():
            captured = capture_dry_step(config, step, StartupClock())
            yield tuple(
                outcome_of_step(
                    recipe,
                    captured.simulate(machine, trace_path=None if index else trace_path),
                )
                for index, machine in enumerate(machines)
            )


def _simulate_pipelines(
    configs: Mapping[RunRecipe, GraphTrainer.Config],
    machines: Sequence[Hardware],
    trace_path: Path | None,
) -> Iterator[Outcomes]:
    first, config = next(iter(configs.items()))
    with fake_ranks(first.num_gpus), flex_attention_on_cpu():
        built = meta_model(config, first.num_gpus)
        pipeline = capture_divided(config, built, planned_pipeline(config))
        for recipe, its_config in configs.items():
            scheduled = replace(pipeline, plan=planned_pipeline(its_config))
            yield tuple(
                outcome_of_pipeline(
                    recipe,
                    simulate_captured(
                        its_config,
                        scheduled,
                        hardware=machine,
                        trace_path=trace_path if recipe == first and index == 0 else None,
                    ),
                )
                for index, machine in enumerate(machines)
            )


def outcome_of_step(recipe: RunRecipe, run: SimulatedRun) -> RecipeOutcome:
    """Return the outcome of a step without a pipeline."""
    exposed = {total.purpose: total.exposed_us for total in run.by_purpose}
    return RecipeOutcome(
        recipe=recipe,
        step_us=run.step_us,
        tokens_per_second_per_gpu=run.tokens_per_second_per_gpu,
        mfu=run.mfu,
        computing_us=sum(each.count * each.graph.compute_us for each in run.runs),
        exposed_us={purpose: us for purpose, us in exposed.items() if us > 0},
        bubble=0.0,
        optimizer_us=run.optimizer_us,
        memory=run.memory_by_kind,
        memory_over_step=memory_of_run(run),
        timeline=timeline_of_run(run),
        peak_bytes=run.peak_bytes,
        capacity_bytes=run.graph.hardware.hbm_capacity_bytes,
        moved=_moved(run.sensitivity),
    )


def outcome_of_pipeline(recipe: RunRecipe, run: SimulatedPipeline) -> RecipeOutcome:
    """Return the outcome of a step in stages."""
    fullest = max(run.memory, key=lambda each: each.peak_bytes)
    exposed = {**run.exposed_us, "gathers and reductions": run.time.gathers}
    exposed |= {"transfers": run.time.transfers, "tied weight": run.shared_us}
    return RecipeOutcome(
        recipe=recipe,
        step_us=run.step_us,
        tokens_per_second_per_gpu=run.tokens_per_second_per_gpu,
        mfu=run.mfu,
        computing_us=run.computing_us,
        exposed_us={purpose: us for purpose, us in exposed.items() if us > 0},
        bubble=run.bubble,
        optimizer_us=run.optimizer_us,
        memory={part: size for part, size in fullest.bytes_by_part.items() if size},
        memory_over_step=memory_of_pipeline(run),
        timeline=timeline_of_pipeline(run),
        peak_bytes=run.peak_bytes,
        capacity_bytes=run.hardware.hbm_capacity_bytes,
        moved=_moved(run.sensitivity),
    )


def _moved(moves: Sensitivity) -> dict[str, float]:
    percent = f"{moves.fraction:.0%}"
    found = {}
    for each in moves.ranges:
        found[f"{each.group} {percent} faster"] = each.faster_us
        found[f"{each.group} {percent} slower"] = each.slower_us
    return found
