"""The memory of a stage of several units, from the memory of stages of one unit each.

Units run one after the other, backwards the other way round. What is held between actions adds up,
but for what passes from unit to unit: inside of a stage that is a saved value. An action's peak is
that of one of its units, on top of what those before it have made and given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gt_config.node_keys import PipelineAction
from gt_pipeline.estimates.action_memory import ActionMemory, StageMemory

_ADDED = (
    "state_bytes",
    "num_parameters",
    "parameter_bytes",
    "gathered_bytes",
    "saved_bytes",
    "between_bytes",
    "accumulated_bytes",
    "reduced_bytes",
)
"""Memory of a stage that is the sum over its units."""


def joined_memory(units: Sequence[StageMemory]) -> StageMemory:
    """Estimate the memory of a stage that holds ``units``, at least one, in this order."""
    sums = {name: sum(getattr(each, name) for each in units) for name in _ADDED}
    sums["saved_bytes"] += sum(each.entering_bytes for each in units[1:])
    return replace(
        units[0],
        **sums,
        leaving_bytes=units[-1].leaving_bytes,
        actions={kind: _joined(units, kind) for kind in units[0].actions},
    )


def memory_of_one(units: StageMemory, count: int) -> StageMemory:
    """The memory of a unit, of which ``count`` equal ones together hold ``units``.

    What ``joined_memory`` makes of as many is ``units`` again, but for rounding.
    """
    if count == 1:
        return units
    parts = {name: getattr(units, name) for name in _ADDED}
    parts["saved_bytes"] = max(0, units.saved_bytes - (count - 1) * units.entering_bytes)
    one = replace(units, **{name: part // count for name, part in parts.items()})

    def of(kind: PipelineAction, memory: ActionMemory) -> ActionMemory:
        if kind in ("UNSHARD", "REDUCE_GRAD"):
            extra = memory.extra_bytes // count
        else:
            extra = memory.extra_bytes - (count - 1) * max(0, _left_by(one, kind))
        launched = memory.launched_bytes // count
        return replace(memory, extra_bytes=extra, launched_bytes=launched)

    return replace(one, actions={kind: of(kind, each) for kind, each in units.actions.items()})


def overlapped_memory(forward: ActionMemory, backward: ActionMemory) -> ActionMemory:
    """Estimate the memory of both in one graph: each may be at its peak when the other is."""
    return ActionMemory(
        extra_bytes=forward.extra_bytes + backward.extra_bytes,
        launched_bytes=forward.launched_bytes + backward.launched_bytes,
        num_unsized=forward.num_unsized + backward.num_unsized,
    )


def _joined(units: Sequence[StageMemory], kind: PipelineAction) -> ActionMemory:
    parts = [each.actions[kind] for each in units]
    if kind in ("UNSHARD", "REDUCE_GRAD"):
        # All of them at once: buckets go from the first layer to the last.
        extra = sum(part.extra_bytes for part in parts)
    else:
        extra = _highest(units, kind)
    return ActionMemory(
        extra_bytes=extra,
        launched_bytes=sum(part.launched_bytes for part in parts),
        num_unsized=sum(part.num_unsized for part in parts),
    )


def _highest(units: Sequence[StageMemory], kind: PipelineAction) -> int:
    """The peak over units, each on top of what the units that ran before it have left."""
    left = highest = 0
    for unit in units if kind == "FORWARD" else reversed(units):
        highest = max(highest, left + unit.actions[kind].extra_bytes)
        left += _left_by(unit, kind)
    return highest


def _left_by(unit: StageMemory, kind: PipelineAction) -> int:
    """How much more is held when a unit's part of an action has run."""
    if kind == "FORWARD":
        return unit.saved_bytes + unit.leaving_bytes
    if kind == "FULL_BACKWARD":
        return unit.accumulated_bytes - unit.saved_bytes
    if kind == "BACKWARD_INPUT":
        return unit.between_bytes - unit.saved_bytes
    return unit.accumulated_bytes - unit.between_bytes
