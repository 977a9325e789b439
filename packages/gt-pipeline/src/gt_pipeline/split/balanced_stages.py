"""Which modules go to which stage, by what each one costs.

Costs are weights, bytes or measured seconds: the division minimizes the largest sum of a stage,
exactly. (The classic linear partition problem, by dynamic programming.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from gt_pipeline.errors import StageLayoutError

__all__ = ["module_names_by_cost"]


def module_names_by_cost(
    costs: Mapping[str, float], *, num_stages: int, every_stage: Sequence[str] = ()
) -> tuple[tuple[str, ...], ...]:
    """Divide modules so that the costliest stage costs as little as it can.

    Among the best divisions, the one that fills earlier stages first.

    Args:
        costs: what each module costs, in the order in which the model runs them.
        num_stages: stages of the whole pipeline.
        every_stage: names to add to each stage.

    Returns:
        For each stage, one name at least, in order.

    Raises:
        StageLayoutError: more stages than modules, or a cost is negative or not finite. Every
            reason is listed.
    """
    problems = [
        f"cost of {name!r} is {cost!r}, must be a finite number of at least 0"
        for name, cost in costs.items()
        if not (math.isfinite(cost) and cost >= 0)
    ]
    problems += [
        f"{name!r} is on every stage and has a cost" for name in every_stage if name in costs
    ]
    if num_stages < 1:
        problems.append(f"num_stages is {num_stages}, must be at least 1")
    elif num_stages > len(costs):
        problems.append(f"each stage needs a module: at most {len(costs)} stages")
    if problems:
        raise StageLayoutError(
            what=f"{len(costs)} modules in {num_stages} stages", problems=problems
        )

    names = list(costs)
    ends = _ends(list(costs.values()), num_stages)
    return tuple(
        (*names[start:end], *every_stage) for start, end in zip([0, *ends], ends, strict=False)
    )


def _ends(costs: Sequence[float], num_stages: int) -> list[int]:
    """Where each stage ends.

    ``best[k][n]``, the least largest sum of the modules from ``n`` on in ``k`` stages::

        best[1][n] = sum(costs[n:])
        best[k][n] = min over m of max(sum(costs[n:m]), best[k - 1][m])
    """
    num_modules = len(costs)
    before = [0, *accumulate(costs)]
    best = [[math.inf] * (num_modules + 1) for _ in range(num_stages + 1)]
    for start in range(num_modules):
        best[1][start] = before[-1] - before[start]
    for stages in range(2, num_stages + 1):
        for start in range(num_modules - stages + 1):
            best[stages][start] = min(
                max(before[end] - before[start], best[stages - 1][end])
                for end in range(start + 1, num_modules - stages + 2)
            )
    ends: list[int] = []
    start = 0
    for stages in range(num_stages, 1, -1):
        bound = best[num_stages][0]
        start = max(
            end
            for end in range(start + 1, num_modules - stages + 2)
            if max(before[end] - before[start], best[stages - 1][end]) <= bound
        )
        ends.append(start)
    return [*ends, num_modules]
