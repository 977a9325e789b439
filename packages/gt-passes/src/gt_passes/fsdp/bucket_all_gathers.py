"""Gather the parameters of a transformer block at once."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from gt_config.graph_kinds import JOINT_GRAPHS, GraphKind
from gt_passes.analysis.code_motion import CodeMotion
from gt_passes.contract import PassContext, PassReport, Refusal
from gt_passes.fsdp.fsdp_buckets import BucketNodes, plan_buckets, replace_uses
from gt_passes.fsdp.fsdp_launches import FsdpLaunch
from gt_passes.fsdp.fsdp_pass import FsdpBucketPass
from gt_passes.registry import register_pass

_aten = torch.ops.aten
_functional = torch.ops._c10d_functional
_ALL_GATHER = _functional.all_gather_into_tensor.default


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class BucketAllGathers(FsdpBucketPass):
    """Replace a block's FSDP all-gathers by one, at the place of the first.

    Shards are concatenated flat, so nothing is padded. What is gathered again for the backward has
    buckets of its own, and so has every group and dtype.

    *Before*::

        g1 = all_gather_into_tensor(a, 8, "fsdp");  w1 = wait_tensor(g1)    # a: [2, 4]
        y = mm(x, w1)
        g2 = all_gather_into_tensor(b, 8, "fsdp");  w2 = wait_tensor(g2)    # b: [4]
        z = mul(y, w2)

    *After*::

        g = all_gather_into_tensor(cat([view(a, [8]), view(b, [4])]), 8, "fsdp")
        p = split_with_sizes_copy(view(wait_tensor(g), [8, 12]), [8, 4], 1)
        w1 = view(p[0], [16, 4]);  w2 = view(p[1], [32])
        y = mm(x, w1)
        z = mul(y, w2)

    *Refuses*: collectives whose result is read by more than one wait, or whose sizes depend on
    data; to move a gathering across a barrier; to move one whose input is written to.

    *Preserves numerics*: yes.
    """

    name: ClassVar[str] = "bucket-all-gathers"
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset({"STEP", "UNSHARD", *JOINT_GRAPHS})

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Bucket all-gathers; see the class."""
        graph = graph_module.graph
        found = self.find_launches(graph, _ALL_GATHER)
        unshards = [each for each in found.launches if each.kind == "unshard"]
        motion = CodeMotion(graph)
        refusals = list(found.refusals)
        num_buckets = num_members = 0
        for planned in plan_buckets(unshards, cap_mib=self.cap_mib, motion=motion):
            # A parameter that several axes shard has gatherings that read one another: one of
            # this bucket may have been moved ahead of the others for an earlier bucket.
            first, *others = sorted(planned, key=_launch)
            bucket = [first]
            launches = {member.launch for member in planned}
            for member in others:
                # The launch itself reads its input where it stands.
                needed = motion.reason_not_to_move(member.launch) or motion.ancestors_after(
                    [member.input], first.launch
                )
                if not isinstance(needed, str):
                    needed = _needed_launch(needed, launches) or needed
                if isinstance(needed, str):
                    refusals.append(Refusal(node_name=member.launch.name, reason=needed))
                    continue
                for node in needed:
                    first.launch.prepend(node)
                bucket.append(member)
            if len(bucket) > 1:
                _fuse(BucketNodes(graph, context.fake_mode, bucket), bucket, graph_module)
                num_buckets += 1
                num_members += len(bucket)
        counts = {"buckets": num_buckets, "all_gathers_bucketed": num_members}
        return PassReport.of(counts, refusals)


def _launch(member: FsdpLaunch) -> Node:
    """Nodes compare by where they stand now."""
    return member.launch


def _needed_launch(needed: Iterable[Node], launches: Collection[Node]) -> str | None:
    """That a member needs another one of its bucket, through the bucket of another axis."""
    found = next((node for node in needed if node in launches), None)
    return None if found is None else f"it needs {found.name}"


def _fuse(nodes: BucketNodes, bucket: list[FsdpLaunch], graph_module: GraphModule) -> None:
    num_ranks = bucket[0].options[0]
    assert isinstance(num_ranks, int)  # by the schema of the operator
    sizes = [member.input_value.numel() for member in bucket]
    with nodes.before(bucket[0].launch):
        flat = [
            nodes.view(member.input, [size], member)
            for member, size in zip(bucket, sizes, strict=True)
        ]
        gathered = nodes.call(_ALL_GATHER, nodes.call(_aten.cat.default, flat), *bucket[0].options)
        waited = nodes.call(_functional.wait_tensor.default, gathered)
        rows = nodes.call(_aten.view.default, waited, [num_ranks, sum(sizes)])
        whole = nodes.results(rows, [[num_ranks, size] for size in sizes], 1)
    replace_uses(graph_module.graph, whole)
    for member in bucket:
        graph_module.graph.erase_node(member.wait)
        graph_module.graph.erase_node(member.launch)
