"""The order of an overlapped pair's graph as text, for goldens."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from gt_passes.ep_overlap.exposed_exchanges import is_compute
from gt_pipeline.graph.exposed_collectives import launched_waits
from gt_pipeline.graph.interleave_actions import lane_of


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
    waits = launched_waits(node)
    if waits:
        number = len(set(numbers.values())) + 1
        numbers.update(dict.fromkeys(waits, number))
        name = str(node.target).split(".")[1].removesuffix("_single").removesuffix("_tensor")
        return f"{name} {number}>"
    return f"<{numbers[node]}" if node in numbers else None


def _cell(text: str, is_own: bool) -> str:
    return text if is_own else ".".ljust(len(text))
