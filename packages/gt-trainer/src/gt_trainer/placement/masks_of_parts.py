"""FlexAttention's masks for a part of a batch, of the kind that the whole batch has.

torchtitan's mask of documents is another function for one sample than for several
(``torchtitan/models/common/attention.py``). A plan was made for the whole batch, which has several,
and its graph holds their function; a rank may have one sample of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torchtitan.models.common.decoder import Decoder

from gt_trace import register_block_masks
from gt_trainer.decoder.attention import attends_with_flex_attention


def make_masks_of_parts(model: Decoder) -> None:
    """Let ``model`` make masks of one sample as it makes those of several; others stay."""
    if attends_with_flex_attention(model.config):
        made = partial(_mask_of_part, model.get_attention_masks)
        object.__setattr__(model, "get_attention_masks", made)


def _mask_of_part(make: Callable[..., Any], positions: torch.Tensor) -> Any:
    if positions.shape[0] > 1:
        return make(positions=positions)
    register_block_masks()

    def first(leaf: Any) -> Any:
        has_samples = isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] == 2
        return leaf[:1] if has_samples else leaf

    return pytree.tree_map(first, make(positions=positions.expand(2, -1).contiguous()))
