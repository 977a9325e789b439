"""Expert-parallel overlap: one chunk's exchange hides behind another's compute.

Three small pieces on one contract, ``gt_config.node_keys.ChunkAnnotation``: chunks are produced
before a trace (``chunk_forwards``) or on its graph, and then scheduled.
"""

from gt_passes.ep_overlap.chunk_inputs import ChunkDim, InputLayout, Slicer, TokenDims
from gt_passes.ep_overlap.chunk_metadata import (
    ChunkRegion,
    ChunkRegions,
    settle_chunk_annotations,
)
from gt_passes.ep_overlap.eager_chunks import chunk_forwards
from gt_passes.ep_overlap.exchange_operators import register_exchange_operator
from gt_passes.ep_overlap.exposed_exchanges import (
    ExposedExchange,
    exposed_exchanges,
    interrupted_exchanges,
)

__all__ = [
    "ChunkDim",
    "ChunkRegion",
    "ChunkRegions",
    "ExposedExchange",
    "InputLayout",
    "Slicer",
    "TokenDims",
    "chunk_forwards",
    "exposed_exchanges",
    "interrupted_exchanges",
    "register_exchange_operator",
    "settle_chunk_annotations",
]
