"""The scheduler of EP overlap of torchtitan's graph_trainer, as a pass on graphs that we captured.

It knows chunks and exchanges by annotations of its own, which are written from ours; nothing else
is changed about the graph. So the two schedulers order the same operators, and the simulator
compares the orders alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule
from torchtitan.experiments.graph_trainer.ep_overlap_pass import ep_overlap_schedule_pass

from gt_config.graph_kinds import EVERY_GRAPH, GraphKind
from gt_config.node_keys import ChunkAnnotation, EpExchangeAnnotation, EpRegionAnnotation
from gt_config.numerics import Numerics
from gt_passes import ChangeBounds, GraphPass, PassContext, PassReport, register_pass
from gt_passes.ep_overlap.exchange_operators import is_exchange_launch, is_exchange_wait
from gt_trace.node_metadata import read_annotation

__all__ = ["PEER_NAME", "PEER_SCHEDULE"]

PEER_NAME = "torchtitan graph_trainer's order"
PEER_SCHEDULE = "peer-ep-overlap-schedule"


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEpOverlapSchedule(GraphPass):
    """Order chunks as the peer does, with the options that its own list of passes gives it."""

    name: ClassVar[str] = PEER_SCHEDULE
    numerics: ClassVar[Numerics] = "bitwise"
    runs_on: ClassVar[frozenset[GraphKind]] = EVERY_GRAPH

    @property
    def bounds(self) -> ChangeBounds:
        """It says nothing of memory."""
        return ChangeBounds(peak_memory_growth=None)

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Annotate for the peer and let it order the graph."""
        roots = _annotate(graph_module)
        of_moe = all(root.endswith(".moe") for root in roots)
        ep_overlap_schedule_pass(
            graph_module,
            module_pattern="layers.*.moe" if of_moe else "layers.*",
            pair_first_token_exchange=of_moe,
        )
        return PassReport(changed=True)


def _annotate(graph_module: GraphModule) -> list[str]:
    """Write the peer's annotations; the roots of the regions found."""
    roots: dict[str, None] = {}
    for node in graph_module.graph.nodes:
        chunk = read_annotation(node, ChunkAnnotation)
        if chunk is None:
            continue
        roots[chunk.region_root] = None
        node.meta["chunked_region_fqn"] = chunk.region_root
        node.meta["chunked_region_role"] = chunk.role
        node.meta["chunked_region_is_backward"] = chunk.direction == "backward"
        node.meta["chunked_region_producer"] = chunk.producer
        if chunk.chunk_id is not None:
            node.meta["chunk_id"] = chunk.chunk_id
        exchange = read_annotation(node, EpExchangeAnnotation)
        part = read_annotation(node, EpRegionAnnotation)
        if (
            exchange is not None
            and exchange.kind == "token_exchange"
            and part is not None
            and (is_exchange_launch(node) or is_exchange_wait(node))
        ):
            custom = {**node.meta.get("custom", {}), "EP_token_exchange": part.kind}
            node.meta["custom"] = custom
    return list(roots)
