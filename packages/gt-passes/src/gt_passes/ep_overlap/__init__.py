"""Expert-parallel overlap: one chunk's exchange hides behind another's compute.

Three small pieces on one contract, ``gt_config.node_keys.ChunkAnnotation``: chunks are produced
before a trace (``chunk_forwards``) or on its graph (``chunk_graph``), and then scheduled.
"""

from gt_passes.ep_overlap.check_joins import check_joins
from gt_passes.ep_overlap.chunk_metadata import ChunkRegions, settle_chunk_annotations
from gt_passes.ep_overlap.eager_chunks import ChunkedForwards, chunk_forwards
from gt_passes.ep_overlap.exchange_operators import register_exchange_operator
from gt_passes.ep_overlap.exposed_exchanges import exposed_exchanges, interrupted_exchanges
from gt_passes.ep_overlap.graph_chunks import chunk_graph
from gt_passes.ep_overlap.input_layout import InputLayout, TokenDims
from gt_passes.ep_overlap.rule_calls import rule

__all__ = [
    "ChunkRegions",
    "ChunkedForwards",
    "InputLayout",
    "TokenDims",
    "check_joins",
    "chunk_forwards",
    "chunk_graph",
    "exposed_exchanges",
    "interrupted_exchanges",
    "register_exchange_operator",
    "rule",
    "settle_chunk_annotations",
]
