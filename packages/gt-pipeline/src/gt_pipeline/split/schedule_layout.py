"""What a schedule asks of the stages: how many on a rank, and which.

This is data, so that a schedule that PyTorch does not have (one from a file, say) is described by
the same few numbers. Loop and V placement as in torch.distributed.pipelining: rank ``r`` of ``P``
has stages ``r, r + P, r + 2 P, ...`` or ``r`` and ``2 P - 1 - r``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gt_pipeline.errors import StageLayoutError
from gt_pipeline.schedules.schedule_rules import (
    SCHEDULE_RULES,
    ScheduleRules,
    ScheduleStyle,
    find_schedule_rules,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleLayout:
    """How the stages of a schedule lie on the ranks.

    Attributes:
        style: which stages a rank has.
        min_stages_per_rank: how many it has at least, and unless asked otherwise.
        max_stages_per_rank: how many it has at most; None for any number.
    """

    style: ScheduleStyle
    min_stages_per_rank: int
    max_stages_per_rank: int | None


def _layout(rules: ScheduleRules) -> ScheduleLayout:
    return ScheduleLayout(
        style=rules.style,
        min_stages_per_rank=rules.stages_per_rank or 2,
        max_stages_per_rank=rules.stages_per_rank,
    )


SCHEDULE_LAYOUTS: Mapping[str, ScheduleLayout] = MappingProxyType(
    {rules.name: _layout(rules) for rules in SCHEDULE_RULES}
    | {"LoopedBFS": _layout(find_schedule_rules("Interleaved1F1B"))}
)
"""The layouts of the schedules that are built here, and of PyTorch's LoopedBFS."""


def find_schedule_layout(name: str) -> ScheduleLayout:
    """The layout of PyTorch's schedule ``name``, in any case.

    Raises:
        StageLayoutError: there is none; the message lists those that exist.
    """
    for known, layout in SCHEDULE_LAYOUTS.items():
        if known.lower() == name.lower():
            return layout
    problem = (
        f"it is none of {', '.join(SCHEDULE_LAYOUTS)}; describe another one by a ScheduleLayout"
    )
    raise StageLayoutError(what=f"schedule {name!r}", problems=[problem])
