"""Launch the gathering of a block's parameters before the blocks ahead of it have run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from gt_config.graph_kinds import JOINT_GRAPHS, SHARD_AXES, STEP_GRAPHS, GraphKind, MeshAxis
from gt_passes.analysis.code_motion import CodeMotion
from gt_passes.contract import PassContext, PassReport, Refusal
from gt_passes.fsdp.fsdp_launches import FsdpLaunch, waits_to_come
from gt_passes.fsdp.fsdp_pass import FsdpPass
from gt_passes.registry import register_pass

_ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchAllGathers(FsdpPass):
    """Move each block's FSDP gathering to before the wait of an earlier block's.

    Gatherings stay in their order, forward and backward being one sequence. After
    ``bucket-all-gathers`` and ``delay-waits``; without the latter, what is launched early is also
    waited for early. Where parameters are gathered along one axis and then along another, the first
    gathering is launched so many blocks earlier again, so that a block hides it, too; what is
    gathered once beside it is not.

    *Before*, for two blocks::

        g0 = all_gather_into_tensor(a, ...);  w0 = wait_tensor(g0)
        y = mm(x, w0)
        g1 = all_gather_into_tensor(b, ...);  w1 = wait_tensor(g1)
        z = mm(y, w1)

    *After*, with ``blocks_ahead=1``::

        g0 = all_gather_into_tensor(a, ...)
        g1 = all_gather_into_tensor(b, ...);  w0 = wait_tensor(g0)
        y = mm(x, w0)
        w1 = wait_tensor(g1)
        z = mm(y, w1)

    *Refuses*: to move a gathering across a barrier; to move one whose input is written to.

    *Preserves numerics*: yes.
    """

    name: ClassVar[str] = "prefetch-all-gathers"
    mesh_axes: ClassVar[frozenset[MeshAxis]] = SHARD_AXES
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset({*STEP_GRAPHS, *JOINT_GRAPHS})

    blocks_ahead: int = 1
    """How many blocks early; 0 leaves everything in place. Each holds one more block's parameters.
    """

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Prefetch; see the class."""
        graph = graph_module.graph
        found = self.find_launches(graph, _ALL_GATHER)
        motion = CodeMotion(graph)
        blocks = _blocks(each for each in found.launches if each.kind == "unshard")
        to_come = waits_to_come(graph)
        places = [_first_wait(block, to_come, motion) for block in blocks]
        refusals = list(found.refusals)
        num_prefetched = 0
        for index, block in enumerate(blocks):
            if self.blocks_ahead == 0 or index == 0:
                continue
            for launch in sorted(block, key=lambda each: -to_come[each.launch]):
                ahead = self.blocks_ahead * to_come[launch.launch]
                outcome = _hoist(launch, places[max(0, index - ahead)], motion)
                if isinstance(outcome, str):
                    refusals.append(Refusal(node_name=launch.launch.name, reason=outcome))
                else:
                    num_prefetched += outcome
        return PassReport.of({"prefetched": num_prefetched}, refusals)


def _blocks(launches: Iterable[FsdpLaunch]) -> list[list[FsdpLaunch]]:
    """Launches of one block and direction together, in the order of their first."""
    blocks: dict[tuple[str, str], list[FsdpLaunch]] = {}
    for launch in launches:
        blocks.setdefault((launch.direction, launch.block), []).append(launch)
    return list(blocks.values())


def _first_wait(block: list[FsdpLaunch], to_come: Mapping[Node, int], motion: CodeMotion) -> Node:
    """Where a block begins to compute: its first wait of those that no prefetch moves.

    What is gathered along one axis only to be gathered along another is waited for earlier. A block
    may have nothing else, if its gatherings along the other axis cannot be moved.
    """
    least = min(to_come[each.wait] for each in block)
    waits = (each.wait for each in block if to_come[each.wait] == least)
    return min(waits, key=motion.position.__getitem__)


def _hoist(launch: FsdpLaunch, place: Node, motion: CodeMotion) -> bool | str:
    """Move a launch and what it needs in front of ``place``, or say why it must not move."""
    if motion.section(launch.launch) != motion.section(place):
        return f"a barrier stands between it and {place.name}"
    moving = motion.ancestors_after([launch.launch], place)
    if isinstance(moving, str):
        return moving
    for node in moving:
        place.prepend(node)
    return bool(moving)
