"""Which collectives of an overlapped pair have nothing of the other action between launch and wait.

The check of what ``InterleaveActions`` is for.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from gt_config.node_keys import PipelineAction, PipelineAnnotation
from gt_passes.analysis.collectives import is_collective, is_declared_launch, waits_of
from gt_passes.ep_overlap.exposed_exchanges import is_compute
from gt_pipeline.graph.interleave_actions import lane_of
from gt_trace import read_annotation


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposedCollective:
    """A collective that is waited for while the other action has work left."""

    stage_index: int
    action: PipelineAction
    launch_name: str
    wait_name: str

    def __str__(self) -> str:
        return (
            f"{self.action} of stage {self.stage_index}: between {self.launch_name} and "
            f"{self.wait_name} the other action computes nothing, and computes later"
        )


def exposed_collectives(graph_module: GraphModule) -> tuple[ExposedCollective, ...]:
    """The collectives with no compute of the other action between launch and wait.

    Not those after which the other action computes nothing more: then there is nothing to hide
    them behind.

    Args:
        graph_module: of an overlapped pair.

    Returns:
        In the order of their launches; empty when something stands behind every one.
    """
    nodes = list(graph_module.graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    found = []
    for launch in nodes:
        waits = sorted(launched_waits(launch), key=position.__getitem__)
        own = read_annotation(launch, PipelineAnnotation)
        if not waits or own is None:
            continue
        begin, end = position[launch], position[waits[0]]
        hidden = any(_computes_elsewhere(node, own) for node in nodes[begin:end])
        has_work = any(_computes_elsewhere(node, own) for node in nodes[end:])
        if has_work and not hidden:
            found.append(
                ExposedCollective(
                    stage_index=own.stage_index,
                    action=own.action,
                    launch_name=launch.name,
                    wait_name=waits[0].name,
                )
            )
    return tuple(found)


def launched_waits(node: Node) -> list[Node]:
    """The waits for the collective that a node launches; empty if it launches none."""
    if not is_collective(node) and not is_declared_launch(node):
        return []
    return list(waits_of(node))


def _computes_elsewhere(node: Node, own: PipelineAnnotation) -> bool:
    lane = lane_of(node)
    return lane is not None and lane != own.slot and is_compute(node)
