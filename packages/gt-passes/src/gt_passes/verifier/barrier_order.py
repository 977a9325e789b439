"""Check that nothing moved across operators with unknown effects, and no draw across another.

Such an operator may log, count, or use a network, so what ran before it runs before it still, even
where no data says so. New nodes may stand anywhere, except that collectives that a pass makes anew
may not take bytes from one side to the other; see ``gt_passes.verifier.declared_bounds``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.fx import Node

from gt_passes.analysis.graph_scan import GraphScan
from gt_passes.graph_problem import GraphProblem


def find_barrier_problems(before: GraphScan, after: GraphScan) -> Iterator[GraphProblem]:
    """Yield a problem for each node of both graphs that moved across an unknown operator."""
    barriers = common_barriers(before, after)
    if not barriers:
        return
    old_segments, new_segments = segments(before, barriers), segments(after, barriers)
    for node, segment in new_segments.items():
        old = old_segments.get(node)
        if old is None or old == segment or node.op in ("placeholder", "get_attr", "output"):
            continue
        crossed = barriers[min(old, segment)]
        was, now = ("after", "before") if old > segment else ("before", "after")
        yield GraphProblem(
            check="barriers",
            node_name=node.name,
            target=str(node.target),
            message=f"it moved across {crossed.name}, of which not all effects are known",
            expected=f"to run {was} {crossed.name}",
            got=f"it runs {now} {crossed.name}",
        )


def find_draw_problems(before: GraphScan, after: GraphScan) -> Iterator[GraphProblem]:
    """Yield a problem if two random draws of both graphs changed their order."""
    kept = set(before.random).intersection(after.random)
    pairs = (filter(kept.__contains__, scan.random) for scan in (before, after))
    for old, new in zip(*pairs, strict=True):
        if old is not new:
            yield GraphProblem(
                check="random numbers",
                node_name=new.name,
                target=str(new.target),
                message="it draws random numbers that another node drew before",
                expected=f"{old.name} to draw first",
                got=f"{new.name} draws first",
            )
            return


def common_barriers(before: GraphScan, after: GraphScan) -> tuple[Node, ...]:
    """The unknown operators that both graphs have, in the order of ``before``."""
    still = set(after.barriers)
    return tuple(barrier for barrier in before.barriers if barrier in still)


def segments(scan: GraphScan, barriers: Sequence[Node]) -> dict[Node, int]:
    """For every node, how many of the barriers run before it."""
    chosen = set(barriers)
    found: dict[Node, int] = {}
    passed = 0
    for node in scan.calls:
        found[node] = passed
        passed += node in chosen
    return found
