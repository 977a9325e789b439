"""What a schedule asks of the stages: how many on a rank, and which.

This is data, so that a schedule that PyTorch does not have (one from a file, say) is described by
the same few numbers. Loop and V placement as in torch.distributed.pipelining: rank ``r`` of ``P``
has stages ``r, r + P, r + 2 P, ...`` or ``r`` and ``2 P - 1 - r``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from gt_pipeline.errors import StageLayoutError

ScheduleStyle = Literal["loop", "v"]


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


_ONE_STAGE = ScheduleLayout(style="loop", min_stages_per_rank=1, max_stages_per_rank=1)
_SEVERAL_STAGES = ScheduleLayout(style="loop", min_stages_per_rank=2, max_stages_per_rank=None)
_V = ScheduleLayout(style="v", min_stages_per_rank=2, max_stages_per_rank=2)

SCHEDULE_LAYOUTS: Mapping[str, ScheduleLayout] = MappingProxyType(
    {
        "GPipe": _ONE_STAGE,
        "1F1B": _ONE_STAGE,
        "Interleaved1F1B": _SEVERAL_STAGES,
        "LoopedBFS": _SEVERAL_STAGES,
        "InterleavedZeroBubble": _SEVERAL_STAGES,
        "ZBVZeroBubble": _V,
        "DualPipeV": _V,
    }
)


def find_schedule_layout(name: str) -> ScheduleLayout:
    """The layout of PyTorch's schedule ``name``, in any case.

    Raises:
        StageLayoutError: there is none; the message lists those that exist.
    """
    by_lower_case = {known.lower(): layout for known, layout in SCHEDULE_LAYOUTS.items()}
    found = by_lower_case.get(name.lower())
    if found is None:
        known = ", ".join(SCHEDULE_LAYOUTS)
        problem = f"it is none of {known}; describe another one by a ScheduleLayout"
        raise StageLayoutError(what=f"schedule {name!r}", problems=[problem])
    return found
