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

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from gt_config import EpOverlapConfig
from gt_passes.ep_overlap import ChunkedForwards, InputLayout, TokenDims, chunk_forwards


def slice_block_mask(mask: BlockMask, start: int, length: int) -> BlockMask:
    """FlexAttention's mask of samples ``start`` to ``start + length``.

    Its ``mask_mod`` is asked about samples by their index in the chunk, and looks them up in
    tensors of the whole batch; so the index is moved.
    """
    whole_mask_mod = mask.mask_mod

    def mask_mod(
        b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        found: torch.Tensor = whole_mask_mod(b + start, h, q_idx, kv_idx)
        return found

    for_all_samples = mask.kv_num_blocks.shape[0] == 1
    part: BlockMask = mask[:1] if for_all_samples else mask[start : start + length]
    part.mask_mod = mask_mod
    return part


_LAYOUTS: Mapping[str, InputLayout] = MappingProxyType(
    {
        "layers.*": InputLayout(
            activation="x",
            arguments={
                "x": TokenDims(batch=0, seq=1),
                # (B, 1, L, L) for attention on CPU, else a BlockMask. Not along the sequence:
                # a chunk of the queries would still need all keys and values.
                "attention_masks": TokenDims(batch=0),
                "positions": TokenDims(batch=0, seq=1),
            },
            slicers=MappingProxyType({BlockMask: slice_block_mask}),
        ),
        "layers.*.moe": InputLayout(
            activation="x_BLD", arguments={"x_BLD": TokenDims(batch=0, seq=1)}
        ),
    }
)
"""The chunk roots by ``--compile.ep_overlap.module_fqn``."""


def chunked_for_capture(
    model: nn.Module, options: EpOverlapConfig, *, is_stage: bool = False
) -> AbstractContextManager[ChunkedForwards | None]:
    """Inside, the modules that ``options`` name run in chunks, if the strategy is eager; else None.

    Args:
        model: parallelized.
        options: validated.
        is_stage: whether ``model`` is a part of one, which may hold none of the modules.

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
        may_match_none=is_stage,
    )
