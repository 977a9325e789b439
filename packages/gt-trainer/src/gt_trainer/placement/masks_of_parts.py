"""FlexAttention's masks for a part of a batch, of the kind that the whole batch has.

torchtitan's mask of documents is another function for one sample than for several
(``torchtitan/models/common/attention.py``). A plan was made for the whole batch, which has several,
and its graph holds their function; a rank may have one sample of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torchtitan.models.common.decoder import Decoder

from gt_trace import register_block_masks
from gt_trainer.decoder.attention import attends_with_flex_attention


def make_masks_of_parts(model: Decoder) -> None:
    """Let ``model`` make masks of one sample as it makes those of several; others stay."""
    if attends_with_flex_attention(model.config):
        object.__setattr__(model, "get_attention_masks", _MasksOfParts(model.get_attention_masks))


class _MasksOfParts:
    """Makes a mask of one sample by taking the first of two.

    Which tensors of a mask have samples is seen once, in masks of two and of three: those whose
    first dim follows.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._have_samples: list[bool] | None = None

    def __call__(self, positions: torch.Tensor) -> Any:
        if positions.shape[0] > 1:
            return self._make(positions=positions)
        register_block_masks()
        leaves, structure = pytree.tree_flatten(self._of(positions, 2))
        if self._have_samples is None:
            of_three = pytree.tree_leaves(self._of(positions, 3))
            self._have_samples = [
                isinstance(two, torch.Tensor) and two.shape[:1] == (2,) and three.shape[:1] == (3,)
                for two, three in zip(leaves, of_three, strict=True)
            ]
        return pytree.tree_unflatten(
            [
                leaf[:1] if has_samples else leaf
                for leaf, has_samples in zip(leaves, self._have_samples, strict=True)
            ],
            structure,
        )

    def _of(self, positions: torch.Tensor, count: int) -> Any:
        return self._make(positions=positions.expand(count, -1).contiguous())
