"""Keep FSDP communication out of the way of expert-parallel token exchanges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from gt_config.graph_kinds import JOINT_GRAPHS, STEP_GRAPHS, GraphKind
from gt_config.node_keys import EpRegionAnnotation
from gt_passes.analysis.code_motion import CodeMotion
from gt_passes.analysis.fsdp_collective import fsdp_collective
from gt_passes.contract import PassContext, PassReport, Refusal
from gt_passes.fsdp.fsdp_launches import FsdpLaunch
from gt_passes.fsdp.fsdp_pass import FsdpPass
from gt_passes.registry import register_pass
from gt_trace.node_metadata import module_fqn, phase_of, read_annotation

_functional = torch.ops._c10d_functional
_FSDP_COLLECTIVES = (
    _functional.all_gather_into_tensor.default,
    _functional.reduce_scatter_tensor.default,
)


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFsdpIntoDenseRegions(FsdpPass):
    """Launch FSDP collectives before or behind a routed-expert region, not inside of it.

    A region reaches from the first dispatch node of a module to its last combine node, in one
    phase, by the annotation of expert-parallel regions. Its token exchanges are on the critical
    path; an FSDP collective that runs beside one takes its bandwidth. Gatherings move in front of
    the region, reductions behind it, where attention and norms run without communication.

    *Before*::

        d = all_to_all_single(x, ...)                       # dispatch
        g = all_gather_into_tensor(w, 8, "fsdp")            # the next block's
        y = experts(wait_tensor(d))                         # compute
        c = all_to_all_single(y, ...)                       # combine

    *After*::

        g = all_gather_into_tensor(w, 8, "fsdp")
        d = all_to_all_single(x, ...)
        y = experts(wait_tensor(d))
        c = all_to_all_single(y, ...)

    *Refuses*: to move across a barrier, what is written to, and what the region itself needs or
    makes.

    *Preserves numerics*: yes.
    """

    name: ClassVar[str] = "schedule-fsdp-into-dense-regions"
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset({*STEP_GRAPHS, *JOINT_GRAPHS})

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Move launches out of routed-expert regions; see the class."""
        graph = graph_module.graph
        found = self.find_launches(graph, *_FSDP_COLLECTIVES)
        motion = CodeMotion(graph)
        regions = _regions(graph, motion)
        refusals = list(found.refusals)
        num_moved = 0
        for launch in found.launches:
            region = _region_around(launch, regions, motion)
            if region is None:
                continue
            reason = _move_out(launch, region, motion)
            if reason is not None:
                refusals.append(Refusal(node_name=launch.launch.name, reason=reason))
            else:
                num_moved += 1
        return PassReport.of({"launches_moved": num_moved}, refusals)


def _regions(graph: Graph, motion: CodeMotion) -> list[tuple[Node, Node]]:
    """First and last node of each routed-expert region, in order."""
    ends: dict[tuple[str, str | None], list[Node]] = {}
    for node in graph.nodes:
        # Gathering the experts' weights is annotated as a part of the region that asks for them,
        # and so are the views of the stored weights that it starts with.
        is_fsdp = fsdp_collective(node) is not None
        is_fsdp = is_fsdp or all(source.op == "placeholder" for source in node.all_input_nodes)
        if not is_fsdp and read_annotation(node, EpRegionAnnotation) is not None:
            module = module_fqn(node).rpartition(".experts")[0] or module_fqn(node)
            ends.setdefault((module, phase_of(node)), []).append(node)
    regions = [(nodes[0], nodes[-1]) for nodes in ends.values()]
    return sorted(regions, key=lambda region: motion.position[region[0]])


def _region_around(
    launch: FsdpLaunch, regions: list[tuple[Node, Node]], motion: CodeMotion
) -> tuple[Node, Node] | None:
    for first, last in regions:
        if motion.position[first] < launch.position < motion.position[last]:
            return first, last
    return None


def _move_out(launch: FsdpLaunch, region: tuple[Node, Node], motion: CodeMotion) -> str | None:
    """Move a launch, with what must go along, to where its region begins or ends."""
    first, last = region
    reason = motion.reason_not_to_move(launch.launch)
    if reason is not None:
        return reason
    if launch.kind == "unshard":
        if motion.section(launch.launch) != motion.section(first):
            return f"a barrier stands between it and {first.name}"
        moving = motion.ancestors_after([launch.launch], first)
        if isinstance(moving, str):
            return moving
        for node in moving:
            first.prepend(node)
        return None
    if motion.section(launch.launch) != motion.section(last):
        return f"a barrier stands between it and {last.name}"
    moving = motion.dependents_before([launch.launch], last)
    if isinstance(moving, str):
        return moving
    if any(last in node.users for node in (launch.launch, *moving)):
        return f"{last.name} depends on it"
    if launch.launch < last:  # it may have gone along with another one
        for node in reversed((launch.launch, *moving)):
            last.append(node)
    return None
