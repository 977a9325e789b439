"""Which modules go to which stage, by what each one costs.

Costs are weights, bytes or measured seconds. The largest sum of a stage is made as small as it can
be, since it sets the pace, and then the others as even as they can be, for memory. (The classic
linear partition problem, by dynamic programming.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from gt_pipeline.errors import StageLayoutError


def module_names_by_cost(
    costs: Mapping[str, float], *, num_stages: int, every_stage: Sequence[str] = ()
) -> tuple[tuple[str, ...], ...]:
    """Divide modules so that the costliest stage costs as little as it can.

    Of the divisions that do so, the one with the least sum of squares; of those, the one with
    larger first stages.

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
    before = [0.0, *accumulate(costs.values())]
    largest, _ = _divide(before, num_stages, combine=max, bound=math.inf)
    _, ends = _divide(
        before, num_stages, combine=lambda cost, rest: cost * cost + rest, bound=largest
    )
    return tuple(
        (*names[start:end], *every_stage) for start, end in zip([0, *ends], ends, strict=False)
    )


def _divide(
    before: Sequence[float],
    num_stages: int,
    *,
    combine: Callable[[float, float], float],
    bound: float,
) -> tuple[float, list[int]]:
    """The least value of a division, and where its stages end.

    ``value[k][n]`` is the least one of the modules from ``n`` on in ``k`` stages of at most
    ``bound`` each; of equal ones, the one whose first stages are larger::

        value[1][n] = combine(cost(n, end of all), 0)
        value[k][n] = min over m of combine(cost(n, m), value[k - 1][m])

    ``before`` is the cost of all modules before each one, and of all.
    """
    num_modules = len(before) - 1
    value = [[math.inf] * (num_modules + 1) for _ in range(num_stages + 1)]
    ends = [[num_modules] * (num_modules + 1) for _ in range(num_stages + 1)]
    for start in range(num_modules):
        cost = before[-1] - before[start]
        value[1][start] = combine(cost, 0.0) if cost <= bound else math.inf
    for stages in range(2, num_stages + 1):
        for start in range(num_modules - stages + 1):
            for end in range(start + 1, num_modules - stages + 2):
                cost = before[end] - before[start]
                if cost > bound:
                    break
                found = combine(cost, value[stages - 1][end])
                if found <= value[stages][start]:
                    value[stages][start], ends[stages][start] = found, end
    found_ends = []
    start = 0
    for stages in range(num_stages, 0, -1):
        start = ends[stages][start]
        found_ends.append(start)
    return value[num_stages][0], found_ends
