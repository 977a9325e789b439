"""One collective in place of several of a block: what gatherings and reductions have in common."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from gt_config.node_keys import FsdpCollectiveKind
from gt_passes._torch_internals import OpOverload
from gt_passes.analysis.code_motion import CodeMotion
from gt_passes.contract import PassContext, PassReport, Refusal
from gt_passes.fsdp.fsdp_buckets import BucketNodes, plan_buckets, replace_uses
from gt_passes.fsdp.fsdp_launches import FsdpLaunch
from gt_passes.fsdp.fsdp_pass import FsdpPass


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpBucketPass(FsdpPass):
    """Replaces a block's collectives of one kind by one."""

    target: ClassVar[OpOverload]
    kind: ClassVar[FsdpCollectiveKind]
    place: ClassVar[int]
    """Which member's place the bucket takes: 0 for the first, -1 for the last."""

    count: ClassVar[str]
    """What members are counted as."""

    cap_mib: int | None = None
    """Most MiB of whole parameters, or gradients, in a bucket; a larger block gets several. None:
    no limit."""

    @abstractmethod
    def bring_together(
        self, members: list[FsdpLaunch], motion: CodeMotion, refusals: list[Refusal]
    ) -> list[FsdpLaunch]:
        """Clear the way for a bucket; returns the members that can be in it."""

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Bucket collectives; see the class."""
        graph = graph_module.graph
        found = self.find_launches(graph, self.target)
        launches = [each for each in found.launches if each.kind == self.kind]
        if not launches:
            return PassReport.of({}, found.refusals)
        motion = CodeMotion(graph)
        refusals = list(found.refusals)
        buckets = plan_buckets(launches, cap_mib=self.cap_mib, motion=motion)
        num_buckets = num_members = 0
        # What an earlier bucket moved stands before its own place; a later one may move it on.
        for planned in sorted(buckets, key=lambda members: members[self.place].position):
            # Collectives along several axes read one another: one of this bucket may have been
            # moved past the others for an earlier bucket. Nodes compare by where they stand now.
            members = sorted(planned, key=lambda member: member.launch)
            bucket = self.bring_together(members, motion, refusals)
            if len(bucket) < 2:
                continue
            nodes = BucketNodes(graph, context.fake_mode, bucket, motion)
            with nodes.before(bucket[self.place].launch):
                results = nodes.exchange(self.target)
            replace_uses(graph, results)
            for member in bucket:
                source = member.input
                graph.erase_node(member.wait)
                graph.erase_node(member.launch)
                if not source.users:  # a cast, which packing does
                    graph.erase_node(source)
            num_buckets += 1
            num_members += len(bucket)
        return PassReport.of({"buckets": num_buckets, self.count: num_members}, refusals)
