"""A plan in words: the ranked table, what binds, what would help, and how sure the ranking is."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gt_trainer.dry_run.numbers_as_text import GIB, ms
from gt_trainer.planning.cluster import Cluster
from gt_trainer.planning.planner import SearchedPlan
from gt_trainer.planning.rank_placement import rank_placement
from gt_trainer.planning.recipe_outcome import RecipeOutcome, Unsimulated
from gt_trainer.planning.run_beside import SimulatedBeside
from gt_trainer.planning.scaling_curve import SCALING_HEAD, ScalingPoint

_MOST_ROWS = 10
_MOST_REFUSALS = 5
_WIDTHS = (12, 13, 6, 8, 8, 7, 12, 6)

RANKED_HEAD = (
    "step",
    "tokens/s/GPU",
    "MFU",
    "memory",
    "exposed",
    "bubble",
    "$M/T tokens",
    "MWh/T",
    "recipe",
)
"""Heads of the cells of ``ranked_rows``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """The answer of ``gt-train plan``. Everything in it is simulated."""

    model: str
    cluster: Cluster
    num_gpus: int
    global_batch_tokens: int
    plan: SearchedPlan
    model_flags: str
    """How the model is chosen on the command line."""

    further: tuple[str, ...]
    """Flags that every recipe has."""

    beside: SimulatedBeside | None = None
    """The run that was to be simulated, too; None if none was."""

    scaling: tuple[ScalingPoint, ...] = ()
    """Other sizes; empty if nobody asked."""

    @property
    def ranked(self) -> list[RecipeOutcome]:
        """Recipes that fit, the fastest first."""
        return self.plan.ranked()

    def __str__(self) -> str:
        """The answer as lines for a terminal."""
        return "\n".join(self._lines())

    def command(self, outcome: RecipeOutcome) -> str:
        """The command line of a recipe, as a job on the cluster runs it."""
        return outcome.recipe.command(self.model_flags, further=self.further)

    @property
    def without_answer(self) -> str | None:
        """Why nothing can be run by this plan, in one sentence; None if something can."""
        plan = self.plan
        if self.ranked:
            return None
        if plan.outcomes:
            return (
                f"none of the {len(plan.outcomes):,} recipes that were simulated fits{_left(plan)}"
            )
        refused = "; ".join(f"{count} with {reason}" for reason, count in plan.refusals)
        if plan.has_all_candidates and not plan.num_left and not plan.failures and refused:
            return f"the rules of a run refuse every recipe that could fit: {refused}"
        failed = f": {plan.failures[0].reason}" if plan.failures else ""
        return f"nothing was simulated in {plan.seconds:.0f} s{_left(plan)}{failed}"

    @property
    def beside_in_words(self) -> str | None:
        """How the run that was to be simulated, too, compares to the first; None if none was."""
        if self.beside is None:
            return None
        run = self.beside.result
        if isinstance(run, Unsimulated):
            return f"{run.recipe} was not simulated: {run.reason}"
        took = f"{ms(run.step_us)} and {run.peak_bytes / GIB:.1f} GiB"
        if not run.fits:
            return f"{run.recipe} does not fit: {took} of {run.capacity_bytes / GIB:.1f}"
        if not self.ranked:
            return f"{run.recipe} fits: {took}"
        first = self.ranked[0]
        times = f"{took}, {run.step_us / first.step_us:.2f} times the first"
        if run.step_us > first.step_us:
            return f"{times}: {why_slower(first, run)}"
        return f"{times}, no recipe that fits is known to be faster: {run.recipe}"

    def as_data(self) -> dict[str, object]:
        """The answer as plain data, for programs."""
        plan = self.plan
        return {
            "simulated": True,
            "model": self.model,
            "hardware": self.cluster.hardware.name,
            "num_gpus": self.num_gpus,
            "global_batch_tokens": self.global_batch_tokens,
            "has_all_candidates": plan.has_all_candidates,
            "num_candidates": plan.num_candidates,
            "num_cut": plan.num_cut,
            "num_simulated": len(plan.outcomes),
            "num_left": plan.num_left,
            "recipes": [{"command": self.command(each), **_as_data(each)} for each in self.ranked],
            "beside": self._beside_as_data(),
            "scaling": [
                {
                    "num_gpus": each.num_gpus,
                    "global_batch_tokens": each.global_batch_tokens,
                    "grows": each.grows,
                    "least_us": each.least_us,
                    "simulated": None
                    if each.simulated is None
                    else {
                        "command": self.command(each.simulated),
                        "step_us": each.simulated.step_us,
                    },
                }
                for each in self.scaling
            ],
        }

    def _beside_as_data(self) -> dict[str, object] | None:
        if self.beside is None:
            return None
        run = self.beside.result
        command = f"gt-train {self.model_flags} {shlex.join(self.beside.flags)}"
        if isinstance(run, Unsimulated):
            return {"command": command, "unsimulated": run.reason}
        return {"command": command, "fits": run.fits, **_as_data(run)}

    def _lines(self) -> Iterator[str]:
        yield (
            f"Plan of {self.model} on {self.num_gpus:,} {self.cluster.hardware.name}, "
            f"{self.global_batch_tokens:,} tokens a step: simulated, nothing here was measured"
        )
        yield from self._search_lines()
        if not self.ranked:
            yield from self._nothing_fits()
            yield from self._beside_line()
            yield from self._scaling()
            return
        yield from ranked_table(self.ranked, self.cluster)
        best = self.ranked[0]
        yield f"  binds            {binding(best)}"
        yield from self._memory_binds(best)
        if len(self.ranked) > 1:
            yield f"  second           {why_slower(best, self.ranked[1])}"
        yield from self._beside_line()
        yield from self._what_if(best)
        yield from self._placement(best)
        yield from self._sensitivity()
        yield self._goodput(best)
        yield from self._scaling()
        yield "To run it, and to see it in detail:"
        yield f"  {self.command(best)}"
        yield f"  {self.command(best)} --dry-run --world-size {self.num_gpus}"

    def _search_lines(self) -> Iterator[str]:
        plan = self.plan
        refused = sum(count for _, count in plan.refusals)
        yield (
            f"  candidates       {plan.num_candidates:,}: {plan.num_cut:,} bounded away "
            f"({plan.num_without_memory:,} of them by memory), {len(plan.outcomes):,} simulated, "
            f"{refused:,} refused by the rules of a run, {len(plan.failures):,} failed, "
            f"{plan.num_left:,} left; {plan.seconds:.0f} s"
        )
        if not plan.has_all_candidates:
            yield "  stopped          before all candidates were known: others may be faster"
        elif plan.num_left:
            yield "  time was up      one of those left may be faster: give more --minutes"
        for reason, count in plan.refusals[:_MOST_REFUSALS]:
            yield f"  refused          {count} with {reason}"
        reasons = dict.fromkeys(each.reason for each in plan.failures)
        yield from (f"  failed           {reason}" for reason in reasons)

    def _nothing_fits(self) -> Iterator[str]:
        outcomes = [each[0] for each in self.plan.outcomes]
        yield least_memory(outcomes) if outcomes else "  nothing was simulated"

    def _beside_line(self) -> Iterator[str]:
        words = self.beside_in_words
        if words is not None:
            yield f"  beside           {words}"

    def _memory_binds(self, best: RecipeOutcome) -> Iterator[str]:
        faster = [each[0] for each in self.plan.outcomes if each[0].step_us < best.step_us]
        if not faster:
            return
        first = min(faster, key=lambda each: each.peak_bytes)
        yield (
            f"  memory binds     {first.recipe} would take {first.step_us / best.step_us - 1:+.1%} "
            f"and needs {first.peak_bytes / GIB:.1f} GiB of {first.capacity_bytes / GIB:.1f}"
        )

    def _what_if(self, best: RecipeOutcome) -> Iterator[str]:
        for index, machine in enumerate(self.plan.machines[1:], start=1):
            ranked = self.plan.ranked(index)
            if not ranked:
                yield f"  what if          {machine.name}: nothing that was simulated fits"
                continue
            other = ranked[0]
            recipe = "the same recipe" if other.recipe == best.recipe else str(other.recipe)
            yield (
                f"  what if          {machine.name}: {ms(other.step_us)}, "
                f"{other.step_us / best.step_us - 1:+.1%}, with {recipe}"
            )

    def _placement(self, best: RecipeOutcome) -> Iterator[str]:
        gpus_per_domain = self.cluster.hardware.gpus_per_node
        for each in rank_placement(best.recipe, gpus_per_domain=gpus_per_domain):
            yield f"  ranks            {each}"

    def _sensitivity(self) -> Iterator[str]:
        if len(self.ranked) > 1:
            yield from (f"  sensitivity      {line}" for line in sensitivity(self.ranked))

    def _scaling(self) -> Iterator[str]:
        if not self.scaling:
            return
        yield "  scaling          tokens/s/GPU: at most, by bounds; of the first guess that fits,"
        yield "                   simulated, which is no search"
        yield SCALING_HEAD
        yield from map(str, self.scaling)

    def _goodput(self, best: RecipeOutcome) -> str:
        of_cluster = goodput_on(self.cluster, self.num_gpus)
        hours = of_cluster.seconds_between_failures / 3600
        speed = best.tokens_per_second_per_gpu * of_cluster.fraction
        return (
            f"  failures         one in {hours:,.1f} hours; a checkpoint every "
            f"{of_cluster.checkpoint_every_seconds / 60:,.1f} minutes loses least: "
            f"{of_cluster.fraction:.1%} goodput, {speed:,.0f} tokens/s/GPU in the long run"
        )


def least_memory(outcomes: Iterable[RecipeOutcome]) -> str:
    """Return the line of a plan in which nothing fits."""
    least = min(outcomes, key=lambda each: each.peak_bytes)
    return (
        f"  nothing fits     the least that was simulated needs "
        f"{least.peak_bytes / GIB:.1f} GiB of {least.capacity_bytes / GIB:.1f}: {least.recipe}"
    )


def ranked_rows(ranked: Iterable[RecipeOutcome], cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each recipe below ``RANKED_HEAD``."""
    for each in ranked:
        dollars = each.dollars_per_trillion_tokens(cluster.price_per_gpu_hour)
        yield (
            f"{each.step_us / 1e3:,.1f}ms",
            f"{each.tokens_per_second_per_gpu:,.0f}",
            f"{each.mfu:.1%}",
            f"{each.peak_bytes / GIB:.1f}GiB",
            f"{each.all_exposed_us / each.step_us:.1%}",
            f"{each.bubble:.1%}",
            f"{dollars / 1e6:.2f}",
            f"{each.megawatt_hours_per_trillion_tokens(cluster.power_watts_per_gpu):,.0f}",
            str(each.recipe),
        )


def ranked_table(
    ranked: Sequence[RecipeOutcome], cluster: Cluster, *, num_rows: int = _MOST_ROWS
) -> Iterator[str]:
    """Yield a row for each of the first recipes, then memory and waits of the first one."""
    for row in (RANKED_HEAD, *ranked_rows(ranked[:num_rows], cluster)):
        *numbers, recipe = row
        cells = (f"{cell:>{width}}" for cell, width in zip(numbers, _WIDTHS, strict=True))
        yield f"{' '.join(cells)}  {recipe}"
    best = ranked[0]
    held = ", ".join(f"{size / GIB:.2f} {kind}" for kind, size in best.memory.items() if size)
    yield f"  memory           {held} (GiB, the fullest rank of the first)"
    exposed = ", ".join(f"{ms(us)} {what}" for what, us in best.exposed_us.items())
    yield f"  exposed          {exposed or 'nothing'} (of the first)"


def _as_data(outcome: RecipeOutcome) -> dict[str, object]:
    return {
        "step_us": outcome.step_us,
        "tokens_per_second_per_gpu": outcome.tokens_per_second_per_gpu,
        "mfu": outcome.mfu,
        "exposed_us": dict(outcome.exposed_us),
        "bubble": outcome.bubble,
        "peak_bytes": outcome.peak_bytes,
        "memory": dict(outcome.memory),
    }


def _left(plan: SearchedPlan) -> str:
    if not plan.has_all_candidates:
        return ", and it was stopped before all candidates were known"
    return f", and {plan.num_left:,} are left: give more --minutes" if plan.num_left else ""


def goodput_on(cluster: Cluster, num_gpus: int) -> Goodput:
    """Of a run on so many GPUs, by the cluster's figures."""
    return goodput(
        num_gpus,
        failures_per_gpu_day=cluster.failures_per_gpu_day,
        checkpoint_seconds=cluster.checkpoint_seconds,
        restart_seconds=cluster.restart_seconds,
    )


def binding(outcome: RecipeOutcome) -> str:
    """What a step's time is spent on most, beside computing."""
    parts = _parts_us(outcome)
    del parts["computing"]
    name, most = max(parts.items(), key=lambda part: part[1])
    computing = outcome.computing_us / outcome.step_us
    share = most / outcome.step_us
    return f"{computing:.0%} of the step computes; most of the rest: {share:.1%} {name}"


def _parts_us(outcome: RecipeOutcome) -> dict[str, float]:
    """What a step's time is spent on; the values add up to it."""
    parts = {f"{name} (network)": us for name, us in outcome.exposed_us.items()}
    parts["computing"] = outcome.computing_us
    parts["bubble"] = outcome.bubble * outcome.step_us
    parts["the optimizer"] = outcome.optimizer_us
    parts["waiting for the host"] = outcome.step_us - sum(parts.values())
    return parts


def why_slower(best: RecipeOutcome, other: RecipeOutcome) -> str:
    """What another recipe spends more time on, most first."""
    of_best = _parts_us(best)
    more = {name: us - of_best.get(name, 0.0) for name, us in _parts_us(other).items()}
    name, us = max(more.items(), key=lambda part: part[1])
    behind = other.step_us - best.step_us
    return f"{ms(behind)} behind, {ms(us)} of {name} more: {other.recipe}"


def sensitivity(ranked: Sequence[RecipeOutcome]) -> list[str]:
    """Return how changes of the machine's constants change the first of several recipes."""
    unchanged = (
        "the first stays first with ±30% of compute, memory, network, latency, and all of them, "
        f"among the {len(ranked)} simulated that fit"
    )
    return [
        f"{moved}: {winner.recipe} is {gain:.1%} faster than the first"
        for moved, winner, gain in ranking_changes(ranked)
    ] or [unchanged]


def ranking_changes(ranked: Sequence[RecipeOutcome]) -> list[tuple[str, RecipeOutcome, float]]:
    """Changes of the machine that put another recipe first: which, and how much faster it is."""
    found = []
    for moved in ranked[0].moved if ranked else ():
        winner = min(ranked, key=lambda each: each.moved[moved])
        if winner.recipe != ranked[0].recipe:
            gain = ranked[0].moved[moved] / winner.moved[moved] - 1
            found.append((moved, winner, gain))
    return found


# What of the time a cluster really trains, when its GPUs fail: checkpoints, losses, restarts.
#
# A run writes a checkpoint every interval and loses, at a failure, what it did since the last
# one, and the time to start again. The interval that wastes least is about sqrt(2 * write *
# MTBF): Young (CACM 1974), and to the next order Daly (FGCS 2006). The default rate is that of
# 419 interruptions in 54 days on 16,384 GPUs (*The Llama 3 Herd of Models*, arXiv 2407.21783,
# section 3.3.4), counted per GPU.
LLAMA3_FAILURES_PER_GPU_DAY = 419 / (54 * 16_384)
_SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """How failures slow a run down. Seconds."""

    seconds_between_failures: float
    checkpoint_every_seconds: float
    fraction: float
    """Of the time, what is spent on steps that count."""


def goodput(
    num_gpus: int,
    *,
    failures_per_gpu_day: float,
    checkpoint_seconds: float,
    restart_seconds: float,
) -> Goodput:
    """Expected goodput with the best interval between checkpoints, to first order.

    Args:
        num_gpus: any of which stops all.
        failures_per_gpu_day: interruptions of one GPU.
        checkpoint_seconds: for which a checkpoint stops training.
        restart_seconds: from a failure to the next step.

    Raises:
        ValueError: a number that is not above 0.
    """
    numbers = (num_gpus, failures_per_gpu_day, checkpoint_seconds, restart_seconds)
    if min(numbers) <= 0:
        raise ValueError(f"goodput of {numbers!r}; allowed: numbers above 0")
    between = _SECONDS_PER_DAY / (num_gpus * failures_per_gpu_day)
    every = optimal_interval_seconds(checkpoint_seconds, between)
    writing = checkpoint_seconds / (every + checkpoint_seconds)
    # A failure comes in the middle of an interval, on average.
    lost = (every / 2 + restart_seconds) / (between + restart_seconds)
    return Goodput(
        seconds_between_failures=between,
        checkpoint_every_seconds=every,
        fraction=max(0.0, (1 - writing) * (1 - lost)),
    )


def optimal_interval_seconds(checkpoint_seconds: float, between_failures: float) -> float:
    """Time of training between two checkpoints that loses least (Daly 2006, eq. 37)."""
    cost, mean = checkpoint_seconds, between_failures
    if cost >= 2 * mean:
        return mean
    ratio = cost / (2 * mean)
    return math.sqrt(2 * cost * mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost
