"""Where a reduction that was launched goes on, read off a rank's list.

A reduction over replicas needs what the reduction over shards made. Waiting for the first right
behind its launch would stall the rank; leaving both to the end of the step would hide only the
first. So the parts are spread evenly over what the rank still computes; the last is waited for at
the end::

    0REDUCE_GRAD  1I2  1I3  1W0  1W1  1W2  1W3  end of the step
    reduce-scatter          wait, all-reduce    wait
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gt_pipeline.schedules import Action


def reduction_points(
    actions: Sequence[Action], num_parts: Mapping[int, int]
) -> dict[int, tuple[int, ...]]:
    """Stages whose reduction goes on behind an action, by the action's place in the list.

    Args:
        actions: of one rank.
        num_parts: of each stage's reduction, its launch included.
    """
    points: dict[int, tuple[int, ...]] = {}
    for place, action in enumerate(actions):
        if action.kind != "REDUCE_GRAD":
            continue
        following = [later for later in range(place + 1, len(actions)) if _computes(actions[later])]
        num_waits = num_parts.get(action.stage, 1) - 1
        for wait in range(1, num_waits if following else 0):
            later = following[math.ceil(len(following) * wait / num_waits) - 1]
            points[later] = (*points.get(later, ()), action.stage)
    return points


def _computes(action: Action) -> bool:
    """Whether it takes time: nobody waits for gradients of the first stage's inputs."""
    return action.is_compute and (action.kind, action.stage) != ("BACKWARD_INPUT", 0)
