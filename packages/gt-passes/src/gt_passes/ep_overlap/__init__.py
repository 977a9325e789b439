"""Expert-parallel overlap: one chunk's exchange hides behind another's compute.

Three small pieces on one contract, ``gt_config.node_keys.ChunkAnnotation``: chunks are produced
before a trace (``chunk_forwards``) or on its graph (``chunk_graph``), and then scheduled.
"""

from gt_passes.ep_overlap.check_joins import WrongJoin, check_joins
from gt_passes.ep_overlap.chunk_metadata import (
    ChunkRegion,
    ChunkRegions,
    settle_chunk_annotations,
)
from gt_passes.ep_overlap.eager_chunks import ChunkedForwards, chunk_forwards
from gt_passes.ep_overlap.exchange_operators import register_exchange_operator
from gt_passes.ep_overlap.exposed_exchanges import (
    ExposedExchange,
    exposed_exchanges,
    interrupted_exchanges,
)
from gt_passes.ep_overlap.graph_chunks import GraphChunks, Join, chunk_graph
from gt_passes.ep_overlap.input_layout import InputLayout, Slicer, TokenDims
from gt_passes.ep_overlap.rule_calls import rule
from gt_passes.errors import GraphChunkingError

__all__ = [
    "ChunkRegion",
    "ChunkRegions",
    "ChunkedForwards",
    "ExposedExchange",
    "GraphChunkingError",
    "GraphChunks",
    "InputLayout",
    "Join",
    "Slicer",
    "TokenDims",
    "WrongJoin",
    "check_joins",
    "chunk_forwards",
    "chunk_graph",
    "exposed_exchanges",
    "interrupted_exchanges",
    "register_exchange_operator",
    "rule",
    "settle_chunk_annotations",
]
