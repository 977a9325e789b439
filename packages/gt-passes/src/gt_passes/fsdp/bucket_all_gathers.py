"""Gather the parameters of a transformer block at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gt_config.graph_kinds import JOINT_GRAPHS, SHARD_AXES, STEP_GRAPHS, GraphKind, MeshAxis
from gt_config.node_keys import FsdpCollectiveKind
from gt_passes._torch_internals import OpOverload
from gt_passes.analysis.code_motion import CodeMotion
from gt_passes.contract import Refusal
from gt_passes.fsdp.fsdp_bucket_pass import FsdpBucketPass
from gt_passes.fsdp.fsdp_launches import FsdpLaunch
from gt_passes.registry import register_pass


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class BucketAllGathers(FsdpBucketPass):
    """Replace a block's FSDP all-gathers by one, at the place of the first.

    Shards are concatenated flat, so nothing is padded. What is gathered again for the backward has
    buckets of its own, and so has every group and dtype.

    *Before*::

        c1 = _to_copy(a, dtype=bfloat16)                                     # a: [2, 4]
        g1 = all_gather_into_tensor(c1, 8, "fsdp");  w1 = wait_tensor(g1)
        y = mm(x, w1)
        c2 = _to_copy(b, dtype=bfloat16)                                     # b: [4]
        g2 = all_gather_into_tensor(c2, 8, "fsdp");  w2 = wait_tensor(g2)
        z = mul(y, w2)

    *After*::

        g = all_gather_into_tensor(pack_bucket([a, b], 1, bfloat16), 8, "fsdp")
        p = unpack_bucket(wait_tensor(g), 8, [8, 4])
        w1 = view(p[0], [16, 4]);  w2 = p[1]
        y = mm(x, w1)
        z = mul(y, w2)

    *Refuses*: collectives whose result is read by more than one wait, or whose sizes depend on
    data; to move a gathering across a barrier; to move one whose input is written to.

    *Preserves numerics*: yes.
    """

    name: ClassVar[str] = "bucket-all-gathers"
    mesh_axes: ClassVar[frozenset[MeshAxis]] = SHARD_AXES
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset({*STEP_GRAPHS, "UNSHARD", *JOINT_GRAPHS})
    target: ClassVar[OpOverload] = torch.ops._c10d_functional.all_gather_into_tensor.default
    kind: ClassVar[FsdpCollectiveKind] = "unshard"
    place: ClassVar[int] = 0
    count: ClassVar[str] = "all_gathers_bucketed"

    def bring_together(
        self, members: list[FsdpLaunch], motion: CodeMotion, refusals: list[Refusal]
    ) -> list[FsdpLaunch]:
        """Move what later launches gather in front of the first; without those that must stay."""
        first, *others = members
        bucket = [first]
        launches = {member.launch for member in members}
        for member in others:
            # The launch itself reads its input where it stands.
            needed = motion.reason_not_to_move(member.launch) or motion.ancestors_after(
                [member.input], first.launch
            )
            if not isinstance(needed, str):  # nor another one, through the bucket of another axis
                others_needed = (node for node in needed if node in launches)
                needed = next((f"it needs {node.name}" for node in others_needed), needed)
            if isinstance(needed, str):
                refusals.append(Refusal(node_name=member.launch.name, reason=needed))
                continue
            for node in needed:
                first.launch.prepend(node)
            bucket.append(member)
        return bucket
