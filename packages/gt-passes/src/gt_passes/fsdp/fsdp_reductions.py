"""One collective for the gradient reductions of a block: reduce-scatters or all-reduces."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from gt_passes._torch_internals import OpOverload
from gt_passes.analysis.code_motion import CodeMotion
from gt_passes.contract import PassContext, PassReport, Refusal
from gt_passes.fsdp.fsdp_buckets import BucketNodes, plan_buckets, replace_uses
from gt_passes.fsdp.fsdp_launches import FsdpLaunch
from gt_passes.fsdp.fsdp_pass import FsdpBucketPass


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketReductions(FsdpBucketPass):
    """Replace a block's gradient reductions by one, at the place of the last.

    What was done with a reduced gradient before that place (a division, a cast, an all-reduce of
    its shard) moves behind it.
    """

    target: ClassVar[OpOverload]
    """The reduction."""

    @abstractmethod
    def flat_input(self, nodes: BucketNodes, bucket: Sequence[FsdpLaunch]) -> Node:
        """Make the one flat tensor that is reduced in place of the members' inputs."""

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Bucket the reductions; see the class."""
        graph = graph_module.graph
        found = self.find_launches(graph, self.target)
        reductions = [each for each in found.launches if each.kind == "reduce_grad"]
        if not reductions:
            return PassReport.of({}, found.refusals)
        motion = CodeMotion(graph)
        refusals = list(found.refusals)
        num_buckets = num_members = 0
        buckets = plan_buckets(reductions, cap_mib=self.cap_mib, motion=motion)
        # What an earlier bucket moved stands before its own place; a later one may move it on.
        for planned in sorted(buckets, key=lambda members: members[-1].position):
            # Reductions along several axes read one another: one of this bucket may have been moved
            # behind the others for an earlier bucket. Nodes compare by where they stand now.
            bucket = sorted(planned, key=lambda member: member.launch)
            place = bucket[-1].launch
            early = bucket[:-1]
            # Early launches read their inputs where they stand.
            reasons = (motion.reason_not_to_move(member.launch) for member in early)
            moved = next(filter(None, reasons), None) or motion.dependents_before(
                [member.wait for member in early], place
            )
            if not isinstance(moved, str):
                launches = {member.launch for member in early}
                needing = next((node for node in moved if node in launches), None)
                moved = moved if needing is None else f"{needing.name} needs it"
            if isinstance(moved, str):
                refusals.append(Refusal(node_name=bucket[0].launch.name, reason=moved))
                continue
            nodes = BucketNodes(graph, context.fake_mode, bucket)
            with nodes.before(place):
                reduced = nodes.call(
                    self.target, self.flat_input(nodes, bucket), *bucket[0].options
                )
                waited = nodes.call(torch.ops._c10d_functional.wait_tensor.default, reduced)
                shapes = [[member.output_value.numel()] for member in bucket]
                results = nodes.results(waited, shapes, 0)
            for node in moved:
                place.prepend(node)
            replace_uses(graph, results)
            for member in bucket:
                graph.erase_node(member.wait)
                graph.erase_node(member.launch)
            num_buckets += 1
            num_members += len(bucket)
        counts = {"buckets": num_buckets, "reductions_bucketed": num_members}
        return PassReport.of(counts, refusals)
