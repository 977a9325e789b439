"""Which stages a rank has."""

from __future__ import annotations

from collections.abc import Sequence

from gt_pipeline.errors import StageLayoutError
from gt_pipeline.schedules.schedule_rules import ScheduleStyle
from gt_pipeline.split.lower_bounds import too_small


def stage_indices_of_rank(
    pp_rank: int,
    pp_degree: int,
    num_stages: int,
    *,
    style: ScheduleStyle | Sequence[Sequence[int]] = "loop",
) -> tuple[int, ...]:
    """The stages of rank ``pp_rank``.

    Args:
        pp_rank: which rank of the pipeline.
        pp_degree: pipeline ranks.
        num_stages: stages of the whole pipeline.
        style: ``"loop"``, ``"v"``, or the stages of each rank.

    Returns:
        Their indices, in the order in which the rank's schedule counts them.

    Raises:
        StageLayoutError: there is no such rank, or the stages cannot lie on the ranks like this.
    """
    by_rank = stages_by_rank(pp_degree, num_stages, style=style)
    if not 0 <= pp_rank < pp_degree:
        raise StageLayoutError(
            what=f"stages of pipeline rank {pp_rank}",
            problems=[f"ranks are 0 to {pp_degree - 1}"],
        )
    return by_rank[pp_rank]


def stages_by_rank(
    pp_degree: int,
    num_stages: int,
    *,
    style: ScheduleStyle | Sequence[Sequence[int]] = "loop",
) -> tuple[tuple[int, ...], ...]:
    """The stages of every rank; as :func:`stage_indices_of_rank`.

    Raises:
        StageLayoutError: the stages cannot lie on the ranks like this. Every reason is listed.
    """
    what = f"{num_stages} stages on {pp_degree} ranks"
    problems = too_small(1, pp_degree=pp_degree, num_stages=num_stages)
    if problems:
        raise StageLayoutError(what=what, problems=problems)
    if not isinstance(style, str):
        explicit = tuple(tuple(stages) for stages in style)
        problems = _explicit_problems(explicit, pp_degree, num_stages)
        if problems:
            raise StageLayoutError(what=f"{what}, rank by rank {explicit}", problems=problems)
        return explicit

    if style not in ("loop", "v"):
        problems.append(f"style is {style!r}, must be 'loop', 'v' or the stages of each rank")
    if num_stages % pp_degree:
        problems.append("the stages do not divide evenly; give the stages of each rank as style")
    elif style == "v" and num_stages != 2 * pp_degree:
        problems.append(f"style 'v' has 2 stages on a rank, not {num_stages // pp_degree}")
    if problems:
        raise StageLayoutError(what=what, problems=problems)
    if style == "v":
        return tuple((rank, num_stages - 1 - rank) for rank in range(pp_degree))
    return tuple(tuple(range(rank, num_stages, pp_degree)) for rank in range(pp_degree))


def _explicit_problems(
    by_rank: tuple[tuple[int, ...], ...], pp_degree: int, num_stages: int
) -> list[str]:
    problems = []
    if len(by_rank) != pp_degree:
        problems.append(f"stages are given for {len(by_rank)} ranks")
    places: dict[int, list[int]] = {stage: [] for stage in range(num_stages)}
    for rank, stages in enumerate(by_rank):
        if not stages:
            problems.append(f"rank {rank} has no stage")
        for stage in stages:
            if stage in places:
                places[stage].append(rank)
            else:
                problems.append(f"rank {rank} has stage {stage}, stages are 0 to {num_stages - 1}")
    for stage, ranks in places.items():
        if not ranks:
            problems.append(f"stage {stage} is on no rank")
        elif len(ranks) > 1:
            problems.append(f"stage {stage} is given {len(ranks)} times, on ranks {ranks}")
    return problems
