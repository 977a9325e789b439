"""Which modules of torchtitan's models run in chunks, and how their inputs are laid out.

In torchtitan 0.3.0 blocks and mixtures of experts take (batch, sequence, model) activations
(torchtitan/models/common/decoder.py and moe.py); tokens are flattened only inside the routed
experts. This module is the one place that knows it: a torchtitan that folds the batch into the
sequence needs other layouts here, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

from torch import nn

from gt_config import EpOverlapConfig
from gt_passes.ep_overlap import InputLayout, TokenDims, chunk_forwards

__all__ = ["chunked_for_capture"]

_LAYOUTS: Mapping[str, InputLayout] = MappingProxyType(
    {
        "layers.*": InputLayout(
            activation="x",
            arguments={
                "x": TokenDims(batch=0, seq=1),
                # (B, 1, L, L), see models/attention.py. Not along the sequence: a chunk of the
                # queries would still need all keys and values.
                "attention_masks": TokenDims(batch=0),
                "positions": TokenDims(batch=0, seq=1),
            },
        ),
        "layers.*.moe": InputLayout(
            activation="x_BLD", arguments={"x_BLD": TokenDims(batch=0, seq=1)}
        ),
    }
)
"""By ``--compile.ep_overlap.module_fqn``."""


def chunked_for_capture(
    model: nn.Module, options: EpOverlapConfig
) -> AbstractContextManager[object]:
    """Inside, the modules that ``options`` name run in chunks, if the strategy is eager.

    Args:
        model: parallelized.
        options: validated.

    Raises:
        ForwardChunkingError: the model's modules cannot be chunked so; also from calls inside.
    """
    if not options.enabled or options.strategy != "eager":
        return nullcontext()
    return chunk_forwards(
        model,
        modules=options.module_fqn,
        chunk_dim=options.chunk_dim,
        num_chunks=options.num_chunks,
        layout=_LAYOUTS[options.module_fqn],
    )
