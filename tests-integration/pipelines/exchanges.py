"""Token exchanges of a stage's graphs, and what stands between their launches and waits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from gt_config.node_keys import ChunkAnnotation, Direction
from gt_passes.analysis.collectives import waits_of
from gt_passes.ep_overlap import exposed_exchanges
from gt_passes.ep_overlap.exchange_operators import is_exchange_launch, is_token_exchange
from gt_passes.ep_overlap.exposed_exchanges import is_compute
from gt_pipeline.graph import GraphPipelineStage, exposed_collectives
from gt_trace import read_annotation


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanges:
    """The token exchanges of one graph."""

    stage_index: int
    action: str
    """Of a pair, both."""

    regions: tuple[tuple[str, Direction], ...]
    """Root and direction of what runs in chunks; what is only cut for them is none."""

    behind: tuple[int, ...]
    """For each exchange, how many operators compute between its launch and its first wait."""

    exposed: tuple[str, ...]
    """Those behind which no other chunk computes; in a pair, nothing of the other action."""


def exchanges_of(stage: GraphPipelineStage) -> Iterator[Exchanges]:
    """Of every graph of a stage that has exchanges or chunks, pairs that were asked for too."""
    for kind, executable in stage._executables.computing.items():
        graph_module = executable.action.graph_module
        exposed = map(str, exposed_exchanges(graph_module))
        yield from _found(stage, kind, graph_module, tuple(exposed))
    for (backward_stage, kind), (_, pair) in stage._executables.pairs.items():
        graph_module = pair.action.graph_module
        tokens = {node.name for node in graph_module.graph.nodes if _sends_tokens(node)}
        found = exposed_collectives(graph_module)  # of tensor parallelism too
        exposed = (str(each) for each in found if each.launch_name in tokens)
        action = f"FORWARD with {kind} of stage {backward_stage}"
        yield from _found(stage, action, graph_module, tuple(exposed))


def _found(
    stage: GraphPipelineStage, action: str, graph_module: GraphModule, exposed: tuple[str, ...]
) -> Iterator[Exchanges]:
    nodes = list(graph_module.graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    behind = []
    for launch in nodes:
        if _sends_tokens(launch):
            first = min(map(position.__getitem__, waits_of(launch)))
            behind.append(sum(map(is_compute, nodes[position[launch] + 1 : first])))
    chunks = (read_annotation(node, ChunkAnnotation) for node in nodes)
    bodies = (chunk for chunk in chunks if chunk is not None and chunk.role == "body")
    regions = tuple(dict.fromkeys((chunk.region_root, chunk.direction) for chunk in bodies))
    if regions or behind:
        yield Exchanges(
            stage_index=stage.stage_index,
            action=action,
            regions=regions,
            behind=tuple(behind),
            exposed=exposed,
        )


def _sends_tokens(node: Node) -> bool:
    return is_exchange_launch(node) and is_token_exchange(node)
