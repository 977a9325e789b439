"""One collective for the gradient reductions of a block: reduce-scatters or all-reduces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gt_config.graph_kinds import STEP_GRAPHS, GraphKind
from gt_config.node_keys import FsdpCollectiveKind
from gt_passes.analysis.code_motion import CodeMotion
from gt_passes.contract import Refusal
from gt_passes.fsdp.fsdp_bucket_pass import FsdpBucketPass
from gt_passes.fsdp.fsdp_launches import FsdpLaunch


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketReductions(FsdpBucketPass):
    """Replaces a block's gradient reductions by one, at the place of the last.

    What was done with a reduced gradient before that place (a division, a cast, an all-reduce of
    its shard) moves behind it.
    """

    runs_on: ClassVar[frozenset[GraphKind]] = frozenset(
        {*STEP_GRAPHS, "REDUCE_GRAD", "JOINT_BACKWARD"}
    )
    kind: ClassVar[FsdpCollectiveKind] = "reduce_grad"
    place: ClassVar[int] = -1
    count: ClassVar[str] = "reductions_bucketed"

    def bring_together(
        self, members: list[FsdpLaunch], motion: CodeMotion, refusals: list[Refusal]
    ) -> list[FsdpLaunch]:
        """Move what reads early results behind the last launch; all members or none."""
        *early, last = members
        # Early launches read their inputs where they stand.
        reasons = (motion.reason_not_to_move(member.launch) for member in early)
        moved = next(filter(None, reasons), None) or motion.dependents_before(
            [member.wait for member in early], last.launch
        )
        if not isinstance(moved, str):
            launches = {member.launch for member in early}
            needing = next((node for node in moved if node in launches), None)
            moved = moved if needing is None else f"{needing.name} needs it"
        if isinstance(moved, str):
            refusals.append(Refusal(node_name=members[0].launch.name, reason=moved))
            return []
        for node in reversed(moved):
            last.launch.append(node)
        return members
