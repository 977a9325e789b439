"""Which schedules there are by name, and which sizes each of them can have.

The rules are those of PyTorch's constructors, collected here as data, so that every violation is
reported at once, before a process group exists. A test compares them with the constructors.

Sources: GPipe (arXiv 1811.06965), 1F1B (arXiv 1806.03377), Interleaved1F1B (arXiv 2104.04473),
InterleavedZeroBubble and ZBVZeroBubble (arXiv 2401.10241), DualPipeV
(https://github.com/deepseek-ai/DualPipe), all as torch.distributed.pipelining has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gt_pipeline.errors import ScheduleError

ScheduleStyle = Literal["loop", "v"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRules:
    """What a schedule of one name demands of its sizes."""

    name: str
    style: ScheduleStyle
    stages_per_rank: int | None
    """How many stages each rank must have; None for any number, the same on each rank."""

    needs_microbatch_per_stage: bool = False
    """Whether there must be at least as many microbatches as stages."""

    needs_even_rounds: bool = False
    """Whether microbatches, which run in rounds of about one per rank, must fill equal rounds."""


SCHEDULE_RULES = (
    ScheduleRules(name="GPipe", style="loop", stages_per_rank=1),
    ScheduleRules(name="1F1B", style="loop", stages_per_rank=1, needs_microbatch_per_stage=True),
    ScheduleRules(
        name="Interleaved1F1B", style="loop", stages_per_rank=None, needs_even_rounds=True
    ),
    ScheduleRules(
        name="InterleavedZeroBubble", style="loop", stages_per_rank=None, needs_even_rounds=True
    ),
    ScheduleRules(name="ZBVZeroBubble", style="v", stages_per_rank=2),
    ScheduleRules(name="DualPipeV", style="v", stages_per_rank=2, needs_microbatch_per_stage=True),
)
"""Every schedule that is built here."""

SCHEDULE_NAMES: tuple[str, ...] = tuple(rules.name for rules in SCHEDULE_RULES)
"""Every name that ``schedule_of`` and ``build_pipeline_schedule`` take, in any case."""


def find_schedule_rules(name: str) -> ScheduleRules:
    """The rules of a schedule, by its name in any case.

    Raises:
        ScheduleError: no schedule has this name.
    """
    rules = next((each for each in SCHEDULE_RULES if each.name.lower() == name.lower()), None)
    if rules is None:
        raise ScheduleError(
            what=f"no schedule is called {name!r}",
            problems=[f"there are {', '.join(SCHEDULE_NAMES)}", "one of your own is read from CSV"],
        )
    return rules


def check_sizes(
    name: str, *, num_ranks: int, num_stages: int, num_microbatches: int
) -> ScheduleRules:
    """The rules of a schedule, by its name in any case, once its sizes are known to obey them.

    Raises:
        ScheduleError: unknown name, or sizes that the schedule cannot have; lists each of them.
    """
    rules = find_schedule_rules(name)
    problems = [
        f"num_{what} must be at least 1, not {size}"
        for what, size in (
            ("ranks", num_ranks),
            ("stages", num_stages),
            ("microbatches", num_microbatches),
        )
        if size < 1
    ]
    if not problems:
        problems = [
            *_stage_problems(rules, num_ranks, num_stages),
            *_microbatch_problems(rules, num_ranks, num_stages, num_microbatches),
        ]
    if problems:
        raise ScheduleError(
            what=(
                f"{rules.name} cannot have {num_ranks} ranks, {num_stages} stages and "
                f"{num_microbatches} microbatches"
            ),
            problems=problems,
        )
    return rules


def _stage_problems(rules: ScheduleRules, num_ranks: int, num_stages: int) -> list[str]:
    per_rank = rules.stages_per_rank
    if per_rank is not None and num_stages != per_rank * num_ranks:
        return [
            f"num_stages must be {per_rank * num_ranks}: {per_rank} on each of {num_ranks} ranks"
        ]
    if num_stages % num_ranks:
        lower = num_stages // num_ranks * num_ranks
        allowed = [str(each) for each in (lower, lower + num_ranks) if each]
        return [
            (
                f"num_stages must be a multiple of num_ranks, {num_ranks}, such as "
                f"{' or '.join(allowed)}"
            )
        ]
    return []


def _microbatch_problems(
    rules: ScheduleRules, num_ranks: int, num_stages: int, num_microbatches: int
) -> list[str]:
    if rules.needs_microbatch_per_stage and num_microbatches < num_stages:
        return [f"num_microbatches must be at least num_stages, {num_stages}"]
    num_rounds = max(1, num_microbatches // num_ranks)
    if rules.needs_even_rounds and num_microbatches % num_rounds:
        lower = num_microbatches // num_ranks * num_ranks
        return [
            (
                f"num_microbatches must divide into {num_rounds} equal rounds (one per num_ranks "
                f"microbatches); multiples of num_ranks do, such as {lower} or {lower + num_ranks}"
            )
        ]
    return []
