"""Which collectives of an overlapped pair have nothing of the other action between launch and wait.

The check of what ``InterleaveActions`` is for, and a picture of what it did.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from gt_config.node_keys import PipelineAction, PipelineAnnotation
from gt_passes.analysis.collectives import is_collective, is_wait, waits_of
from gt_passes.ep_overlap.exchange_operators import is_exchange_launch
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
        waits = sorted(_waits_of(launch), key=position.__getitem__)
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


def draw_lanes(graph_module: GraphModule) -> str:
    """The order of a pair's graph as two lines: collectives, waits, and how much is computed.

    ::

        backward  all_to_all 1>  .      <1 6 ops
        forward   .              4 ops  .

    Args:
        graph_module: of an overlapped pair.
    """
    numbers: dict[Node, int] = {}
    columns: list[tuple[int, str]] = []
    num_ops = 0
    latest: int | None = None

    def flush() -> None:
        nonlocal num_ops
        if num_ops and latest is not None:
            columns.append((latest, f"{num_ops} op" + "s" * (num_ops > 1)))
        num_ops = 0

    for node in graph_module.graph.nodes:
        lane = lane_of(node)
        if lane is None:
            continue
        text = _event(node, numbers)
        if text is None:
            if is_compute(node):
                if lane != latest:
                    flush()
                latest = lane
                num_ops += 1
            continue
        flush()
        latest = lane
        columns.append((lane, text))
    flush()
    return "".join(
        f"{name:10}{' '.join(_cell(text, lane == own) for own, text in columns)}".rstrip() + "\n"
        for lane, name in enumerate(("backward", "forward"))
    )


def _event(node: Node, numbers: dict[Node, int]) -> str | None:
    waits = _waits_of(node)
    if waits:
        number = len(set(numbers.values())) + 1
        numbers.update(dict.fromkeys(waits, number))
        name = str(node.target).split(".")[1].removesuffix("_single").removesuffix("_tensor")
        return f"{name} {number}>"
    return f"<{numbers[node]}" if node in numbers else None


def _cell(text: str, is_own: bool) -> str:
    return text if is_own else ".".ljust(len(text))


def _waits_of(node: Node) -> list[Node]:
    if is_exchange_launch(node):
        return list(waits_of(node))
    if not is_collective(node):
        return []
    return [user for user in node.users if is_wait(user)]


def _computes_elsewhere(node: Node, own: PipelineAnnotation) -> bool:
    lane = lane_of(node)
    return lane is not None and lane != own.slot and is_compute(node)
