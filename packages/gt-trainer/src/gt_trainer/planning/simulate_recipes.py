"""Recipes that share a capture, simulated by the functions of a dry run."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gt_config import ConfigError
from gt_passes.simulation import Hardware, Sensitivity
from gt_trace import flex_attention_on_cpu
from gt_trainer.device import intended_for
from gt_trainer.dry_run.captured_dry_step import capture_dry_step
from gt_trainer.dry_run.fake_pipeline import FakePipeline, capture_divided, planned_pipeline
from gt_trainer.dry_run.fake_step import fake_ranks, fake_step, meta_model
from gt_trainer.dry_run.memory_over_step import memory_of_pipeline, memory_of_run
from gt_trainer.dry_run.pipeline_dry_run import simulate_captured
from gt_trainer.dry_run.simulated_pipeline import SimulatedPipeline
from gt_trainer.dry_run.simulated_run import SimulatedRun
from gt_trainer.dry_run.step_timeline import timeline_of_pipeline, timeline_of_run
from gt_trainer.planning.recipe_config import recipe_config
from gt_trainer.planning.recipe_outcome import RecipeOutcome, Unsimulated
from gt_trainer.planning.run_recipe import RunRecipe
from gt_trainer.quantization.quantized_model import with_quantized_model
from gt_trainer.startup import StartupClock
from gt_trainer.trainer import GraphTrainer

Outcomes = tuple[RecipeOutcome, ...]
"""Of one recipe on each machine."""


def simulate_recipes(
    base: GraphTrainer.Config,
    recipes: Sequence[RunRecipe],
    machines: Sequence[Hardware],
    *,
    asked: Collection[str] = (),
    trace_path: Path | None = None,
) -> list[Outcomes | Unsimulated]:
    """Simulate recipes that differ in nothing that a capture sees: see ``capture_key``.

    Args:
        base: with the flags that every recipe has. Not changed.
        recipes: one or more.
        machines: to simulate each on.
        asked: as for ``recipe_config``.
        trace_path: where to write a Perfetto trace of the first one; None writes none.

    Raises:
        Exception: whatever building, placing or capturing raises.
    """
    with intended_for("cuda"), warnings.catch_warnings():
        # Of captures, which run on this machine's CPU: the run will not.
        warnings.filterwarnings("ignore", message="In CPU autocast")
        found: dict[RunRecipe, Outcomes | Unsimulated] = {}
        configs: dict[RunRecipe, GraphTrainer.Config] = {}
        for recipe in recipes:
            try:
                config = recipe_config(base, recipe, asked=asked)
            except ConfigError as error:
                found[recipe] = refused(recipe, error)
            else:
                configs[recipe] = with_quantized_model(unverified(config))
        if configs:
            capture = _simulate_pipelines if recipes[0].pp > 1 else _simulate_steps
            found |= capture(configs, machines, trace_path)
        return [found[recipe] for recipe in recipes]


def capture_key(recipe: RunRecipe) -> RunRecipe:
    """Equal for recipes that one capture serves: schedules of the same stages."""
    stages = {None: None, "1F1B": "1"}.get(recipe.schedule, "2")
    return replace(recipe, schedule=stages)


def refused(recipe: RunRecipe, error: ConfigError) -> Unsimulated:
    """A recipe that breaks a rule, with the first rule that it breaks."""
    first = error.violations[0]
    reason = f"{first.flag} {first.value!r}: allowed is {first.allowed}"
    return Unsimulated(recipe=recipe, reason=reason, is_refused=True)


def unverified(config: GraphTrainer.Config) -> GraphTrainer.Config:
    """Verification changes no graph and takes its time; the run that is chosen does it."""
    return replace(config, compile=replace(config.compile, verify_passes=False))


def _simulate_steps(
    configs: Mapping[RunRecipe, GraphTrainer.Config],
    machines: Sequence[Hardware],
    trace_path: Path | None,
) -> dict[RunRecipe, Outcomes | Unsimulated]:
    found: dict[RunRecipe, Outcomes | Unsimulated] = {}
    for recipe, config in configs.items():
        with fake_step(config, recipe.num_gpus) as step, flex_attention_on_cpu():
            captured = capture_dry_step(config, step, StartupClock())
            first, *others = machines
            simulated = [captured.simulate(first, trace_path=trace_path)]
            simulated += [captured.simulate(each) for each in others]
        found[recipe] = tuple(outcome_of_step(recipe, each) for each in simulated)
    return found


def _simulate_pipelines(
    configs: Mapping[RunRecipe, GraphTrainer.Config],
    machines: Sequence[Hardware],
    trace_path: Path | None,
) -> dict[RunRecipe, Outcomes | Unsimulated]:
    recipe, config = next(iter(configs.items()))
    found: dict[RunRecipe, Outcomes | Unsimulated] = {}
    with fake_ranks(recipe.num_gpus), flex_attention_on_cpu():
        built = meta_model(config, recipe.num_gpus)
        pipeline = capture_divided(config, built, planned_pipeline(config))
        for each, its_config in configs.items():
            found[each] = tuple(
                outcome_of_pipeline(
                    each,
                    simulate_captured(
                        its_config,
                        _by_schedule(pipeline, its_config),
                        hardware=machine,
                        trace_path=trace_path if each == recipe and index == 0 else None,
                    ),
                )
                for index, machine in enumerate(machines)
            )
    return found


def _by_schedule(pipeline: FakePipeline, config: GraphTrainer.Config) -> FakePipeline:
    return replace(pipeline, plan=planned_pipeline(config))


def outcome_of_step(recipe: RunRecipe, run: SimulatedRun) -> RecipeOutcome:
    """What a plan tells of a step without a pipeline."""
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
    """What a plan tells of a step in stages."""
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
