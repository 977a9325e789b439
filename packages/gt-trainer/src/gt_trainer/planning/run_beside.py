"""A run that somebody has already, simulated beside a plan: as a dry run of its flags, to the end.

It is none of the plan's candidates: no bound cuts it, it cuts nothing, and it need have nothing of
what recipes have.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

from gt_config import ConfigError
from gt_passes.simulation import Hardware
from gt_trainer.device import intended_for
from gt_trainer.dry_run.dry_run import dry_run
from gt_trainer.launcher.child import ChildFailedError, RunningChild
from gt_trainer.planning.candidates import NoRecipeError
from gt_trainer.planning.recipe_outcome import RecipeOutcome, Unsimulated
from gt_trainer.planning.run_recipe import RunRecipe
from gt_trainer.planning.simulate_recipes import outcome_of, unverified
from gt_trainer.preflight.preflight import check_configuration, topology_of
from gt_trainer.preflight.settled_defaults import settle_defaults
from gt_trainer.trainer import GraphTrainer

_GLOBAL_BATCH = "--training.global_batch_size"
_LOOKS_EVERY_SECONDS = 1.0
"""Whether nobody waits any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBeside:
    """A run to be simulated."""

    flags: tuple[str, ...]
    """Of the configuration, as typed: the plan's, and its own."""

    asked: frozenset[str]
    """The names of these flags."""

    config: GraphTrainer.Config
    """With these flags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedBeside:
    """What came of it."""

    flags: tuple[str, ...]
    """That start it."""

    result: RecipeOutcome | Unsimulated
    """Its recipe says what distinguishes it, and not all that it is."""


def checked_beside(run: RunBeside, num_gpus: int, global_batch: int) -> RunBeside:
    """The run as it would be started: with the plan's batch, and the device's defaults settled.

    Args:
        run: what is asked for.
        num_gpus: of the plan.
        global_batch: of the plan, in sequences.

    Raises:
        NoRecipeError: it has another batch, a solver places it, or it cannot be; lists all that
            is wrong.
    """
    config, flags = run.config, run.flags
    problems = []
    if config.compile.autoparallel:
        problems.append("a solver places it, for minutes: --dry-run simulates it alone")
    if _GLOBAL_BATCH in run.asked:
        sequences = _sequences(config, num_gpus)
        if sequences != global_batch:
            problems.append(f"its step has {sequences:,} sequences, the plan's {global_batch:,}")
    else:
        training = replace(config.training, global_batch_size=global_batch)
        config = replace(config, training=training)
        flags = (*flags, _GLOBAL_BATCH, str(global_batch))
    try:
        with intended_for("cuda"):
            config, _ = settle_defaults(config, num_gpus, asked=run.asked)
            check_configuration(config, num_gpus, will_train=False)
    except ConfigError as error:
        problems.append(
            f"on {num_gpus:,} GPUs, with the plan's batch of {global_batch:,} sequences, {error}"
        )
    if problems:
        listed = "\n  ".join(problem.replace("\n", "\n  ") for problem in problems)
        raise NoRecipeError(f"the run of --beside cannot be compared:\n  {listed}")
    return replace(run, flags=flags, config=config)


def start_beside(run: RunBeside, num_gpus: int, hardware: Hardware) -> RunningChild[RecipeOutcome]:
    """Simulate a run in a child of this process.

    Args:
        run: of ``checked_beside``.
        num_gpus: of the plan.
        hardware: the machine.
    """

    def simulate() -> RecipeOutcome:
        with intended_for("cuda"), warnings.catch_warnings():
            # Of captures, which run on this machine's CPU: the run will not.
            warnings.filterwarnings("ignore", message="In CPU autocast")
            report = dry_run(
                unverified(run.config), num_gpus, hardware=hardware, is_allowed=lambda _: False
            )
        return outcome_of(recipe_of(run.config, num_gpus), report.simulated)

    return RunningChild(simulate)


def finish_beside(
    run: RunBeside,
    num_gpus: int,
    child: RunningChild[RecipeOutcome],
    *,
    tell: Callable[[str], None],
    is_stopped: Callable[[], bool],
) -> SimulatedBeside:
    """Wait for what was started, however long.

    Args:
        run: of ``checked_beside``.
        num_gpus: of the plan.
        child: of ``start_beside``.
        tell: is told that it is waited for.
        is_stopped: asked once in a while: True ends the wait.
    """

    def unsimulated(reason: str) -> SimulatedBeside:
        recipe = recipe_of(run.config, num_gpus)
        result = Unsimulated(recipe=recipe, reason=reason)
        return SimulatedBeside(flags=run.flags, result=result)

    if not child.receiver.poll():
        tell("the search is over, and waits for the run beside it")
    while not child.receiver.poll(_LOOKS_EVERY_SECONDS):
        if is_stopped():
            return unsimulated("the search was stopped")
    try:
        return SimulatedBeside(flags=run.flags, result=child.result())
    except ChildFailedError as error:
        return unsimulated(error.reason)


def recipe_of(config: GraphTrainer.Config, num_gpus: int) -> RunRecipe:
    """What distinguishes a run, which may have more than a recipe says.

    Args:
        config: of a run that can be.
        num_gpus: its ranks.
    """
    mesh = topology_of(config, num_gpus)
    is_pipelined = mesh.pp > 1
    linears = config.quantization.linears
    return RunRecipe(
        dp_replicate=mesh.dp_replicate,
        dp_shard=mesh.dp_shard,
        cp=mesh.cp,
        tp=mesh.tp,
        ep=mesh.ep,
        pp=mesh.pp,
        schedule=config.parallelism.pipeline_parallel_schedule if is_pipelined else None,
        microbatch=mesh.microbatch_size if is_pipelined else mesh.batch_size,
        global_batch=_sequences(config, num_gpus),
        memory_policy=config.compile.memory_policy,
        ep_overlap=config.compile.ep_overlap.enabled,
        reduces_once=config.compile.accumulation == "reduce_once",
        linears=linears,
        skipped=tuple(config.quantization.skip) if linears != "none" else (),
    )


def _sequences(config: GraphTrainer.Config, num_gpus: int) -> int:
    """Of one step."""
    if config.training.global_batch_size > 0:
        return int(config.training.global_batch_size)
    mesh = topology_of(config, num_gpus)
    return mesh.batch_size * mesh.dp_replicate * mesh.dp_shard
