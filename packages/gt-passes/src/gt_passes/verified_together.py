"""Which passes are verified together, and between which of them the graph is looked at.

Most of what the verifier finds out is about the whole graph, and costs as much after a pass that
changed one node as after ten that changed all. So passes that keep the dataflow are verified once,
after the last of them: what is computed then is what was computed before the first, whatever stood
in between. If something is wrong, they run again and each is verified, so that the one to blame is
named. What a pass declares of itself is seen by a look at the graph before and after it.
"""

from __future__ import annotations

from collections.abc import Sequence

from gt_passes.contract import ChangeBounds, GraphPass


def groups_of_passes(passes: Sequence[GraphPass]) -> list[range]:
    """The positions of passes that are verified together: neighbours that keep the dataflow."""
    groups: list[range] = []
    for position, graph_pass in enumerate(passes):
        follows_its_like = (
            graph_pass.keeps_dataflow and position > 0 and passes[position - 1].keeps_dataflow
        )
        begin = groups.pop().start if follows_its_like else position
        groups.append(range(begin, position + 1))
    return groups


def is_look_due(earlier: GraphPass, later: GraphPass) -> bool:
    """Whether the graph is to be looked at between two passes of a group.

    Passes between two looks are held together to what each declares: they must be alike in what
    they may do to collectives. A pass that only removes, or has a bound on the peak of memory, is
    held to that alone.
    """
    bounds, next_bounds = earlier.bounds, later.bounds
    if _is_held_alone(bounds) or _is_held_alone(next_bounds):
        return True
    return bounds.collective_bytes_may_shrink != next_bounds.collective_bytes_may_shrink


def _is_held_alone(bounds: ChangeBounds) -> bool:
    return bounds.only_removes or bounds.peak_memory_growth is not None
