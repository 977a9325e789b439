"""How a model's training scales: from 64 to 16,384 GPUs, the batch fixed or growing with them.

Of each size two things are told. *At most* is a bound: no recipe of the space is faster in the
simulator. *Simulated* is no search but the recipe that is guessed to be the fastest: guesses are
simulated in their order until one fits, and those that run beside it count too. Sizes take turns,
those nearest to the plan's first, with the batch growing and with it fixed. What they leave of the
time is for the first that found nothing, if it is more than it had, then for the next.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from gt_trainer.planning.candidates import PlanRequest
from gt_trainer.planning.planner import SearchedPlan
from gt_trainer.planning.recipe_outcome import RecipeOutcome

_BATCH = "--training.global_batch_size"

SIZES = (64, 256, 1024, 4096, 16_384)
"""GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """One number of GPUs with one batch."""

    num_gpus: int
    global_batch_tokens: int
    grows: bool
    """Whether the batch is that of the plan for each GPU, or that of the plan."""

    least_us: float | None
    """A step takes no less with any recipe; None if there is none that could fit."""

    simulated: RecipeOutcome | None
    """None if nothing that fits was simulated in time."""

    @property
    def most_tokens_per_second_per_gpu(self) -> float | None:
        """By ``least_us``."""
        if self.least_us is None:
            return None
        return 1e6 * self.global_batch_tokens / self.least_us / self.num_gpus

    def __str__(self) -> str:
        """As a row below ``SCALING_HEAD``."""
        most, found = self.most_tokens_per_second_per_gpu, self.simulated
        batch = "growing" if self.grows else "fixed"
        row = f"{self.num_gpus:8,} {self.global_batch_tokens:14,} {batch:>8} "
        if most is None:
            return f"{row}{'no recipe has this batch, these flags, and could fit':>13}"
        row += f"{most:13,.0f} "
        if found is None:
            return f"{row}{'-':>13}"
        return f"{row}{found.tokens_per_second_per_gpu:13,.0f} {found.mfu:6.1%}  {found.recipe}"


SCALING_HEAD = "    GPUs   batch tokens    batch       at most     simulated    MFU  recipe"


def scaling_curve(
    search: Callable[..., SearchedPlan],
    request: PlanRequest,
    plan: SearchedPlan,
    *,
    seq_len: int,
    seconds: float,
    sizes: Sequence[int] = SIZES,
    is_stopped: Callable[[], bool] = lambda: False,
) -> tuple[ScalingPoint, ...]:
    """Bound and simulate each size.

    Args:
        search: ``search_plan``, which needs the request, the machines and the time.
        request: of the plan.
        plan: the results of the search, which are the point of its own size.
        seq_len: tokens of a sequence.
        seconds: for all sizes; the points that are left share what is left.
        sizes: numbers of GPUs, in addition to that of the plan.
        is_stopped: as for ``search_plan``; no further size begins then.
    """
    until = time.monotonic() + seconds
    points = list(_requests(request, sorted({*sizes, request.num_gpus})))
    points.sort(key=lambda point: abs(math.log(point[1].num_gpus / request.num_gpus)))
    found = [plan if each == request else None for _, each in points]

    unknown = [number for number, each in enumerate(found) if each is None]
    turns: dict[int, float] = {}

    def take_turn(number: int, seconds: float) -> None:
        searched = search(points[number][1], plan.machines[:1], seconds=seconds, enough=1)
        if number not in turns or searched.ranked():
            found[number] = searched
        turns[number] = seconds

    for begun, number in enumerate(unknown):
        take_turn(number, max(0.0, until - time.monotonic()) / (len(unknown) - begun))
        if is_stopped():
            found[number] = None
            break
    for number in unknown:
        left = until - time.monotonic()
        if not is_stopped() and _had_too_little_time(found[number]) and left > turns[number]:
            take_turn(number, left)
    curve = [
        ScalingPoint(
            num_gpus=each.num_gpus,
            global_batch_tokens=each.global_batch * seq_len,
            grows=grows,
            least_us=searched.least_us,
            simulated=next(iter(searched.ranked()), None),
        )
        for (grows, each), searched in zip(points, found, strict=True)
        if searched is not None
    ]
    return tuple(sorted(curve, key=lambda point: (not point.grows, point.num_gpus)))


def _had_too_little_time(searched: SearchedPlan | None) -> bool:
    return searched is not None and searched.num_left > 0 and not searched.ranked()


def _requests(request: PlanRequest, sizes: Sequence[int]) -> Iterator[tuple[bool, PlanRequest]]:
    """Whether the batch grows, and what is asked. A batch of no whole sequences is left out."""
    for num_gpus in sizes:
        growing, rest = divmod(request.global_batch * num_gpus, request.num_gpus)
        if not rest and growing:
            fixed = dict(request.fixed)
            if _BATCH in fixed:
                fixed[_BATCH] = growing
            yield True, replace(request, num_gpus=num_gpus, global_batch=growing, fixed=fixed)
    for num_gpus in sizes:
        yield False, replace(request, num_gpus=num_gpus)
