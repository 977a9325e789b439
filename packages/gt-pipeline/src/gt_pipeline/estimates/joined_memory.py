"""What a stage of several units would hold, from what stages of one unit each hold.

Units run one after the other, backwards the other way round. What is held between actions adds up,
but for what passes from unit to unit: inside of a stage that is a saved value. An action's peak is
that of one of its units, on top of what those before it have made and given up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gt_config.node_keys import PipelineAction
from gt_pipeline.estimates.action_memory import ActionMemory, StageMemory


def joined_memory(units: Sequence[StageMemory]) -> StageMemory:
    """Estimate the memory of a stage that holds ``units``, at least one, in this order."""

    def total(of: Iterable[int]) -> int:
        return sum(of)

    passed_on = total(each.entering_bytes for each in units[1:])
    return StageMemory(
        state_bytes=total(each.state_bytes for each in units),
        num_parameters=total(each.num_parameters for each in units),
        parameter_bytes=total(each.parameter_bytes for each in units),
        gathered_bytes=total(each.gathered_bytes for each in units),
        saved_bytes=total(each.saved_bytes for each in units) + passed_on,
        between_bytes=total(each.between_bytes for each in units),
        accumulated_bytes=total(each.accumulated_bytes for each in units),
        reduced_bytes=total(each.reduced_bytes for each in units),
        entering_bytes=units[0].entering_bytes,
        leaving_bytes=units[-1].leaving_bytes,
        actions={kind: _joined(units, kind) for kind in units[0].actions},
    )


def overlapped_memory(forward: ActionMemory, backward: ActionMemory) -> ActionMemory:
    """Estimate the memory of both in one graph: each may be at its peak when the other is."""
    return ActionMemory(
        extra_bytes=forward.extra_bytes + backward.extra_bytes,
        launched_bytes=forward.launched_bytes + backward.launched_bytes,
        made_bytes={**forward.made_bytes, **backward.made_bytes},
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
        made_bytes={
            slot: sum(part.made_bytes.get(slot, 0) for part in parts)
            for slot in dict.fromkeys(slot for part in parts for slot in part.made_bytes)
        },
        num_unsized=sum(part.num_unsized for part in parts),
    )


def _highest(units: Sequence[StageMemory], kind: PipelineAction) -> int:
    """The peak over units, each on top of what the units that ran before it have left."""
    left = highest = 0
    for unit in units if kind == "FORWARD" else reversed(units):
        highest = max(highest, left + unit.actions[kind].extra_bytes)
        if kind == "FORWARD":
            left += unit.saved_bytes + unit.leaving_bytes
        elif kind == "FULL_BACKWARD":
            left += unit.accumulated_bytes - unit.saved_bytes
        elif kind == "BACKWARD_INPUT":
            left += unit.between_bytes - unit.saved_bytes
        else:
            left += unit.accumulated_bytes - unit.between_bytes
    return highest
