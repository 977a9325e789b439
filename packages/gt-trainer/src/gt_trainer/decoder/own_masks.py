"""Masks of decoders whose layers do not all attend to the same tokens, as plain tensors.

Such a decoder (sliding windows in some of its layers, say) makes its masks itself, for
FlexAttention, and each layer finds its own among them. Attention on CPU takes the same masks
written out: what a layer may see is asked of the model, and known here of none.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.utils import _pytree as pytree
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.decoder import Decoder


class OwnMasksError(ValueError):
    """A decoder makes masks that cannot be written out."""


def makes_own_masks(model_config: object) -> bool:
    """Whether a model's masks are others than the one of documents that all layers share.

    Args:
        model_config: A configuration of torchtitan's.
    """
    if not isinstance(model_config, Decoder.Config):
        return False
    kind = model_config._owner
    return kind is not None and kind.get_attention_masks is not Decoder.get_attention_masks  # type: ignore[attr-defined]  # a class of decoders


def own_masks(model: Decoder, positions: torch.Tensor) -> Any:
    """Let a model whose attention was replaced make its masks, and write them out.

    Args:
        model: Makes its own masks, for FlexAttention.
        positions: (B, L) integers, the position of each token in its document.

    Returns:
        As the model returns them, each a (B, 1, L, L) bool tensor in place of a ``BlockMask``.

    Raises:
        OwnMasksError: One of them is no ``BlockMask``.
    """
    asked = object.__new__(type(model))
    asked.__dict__.update(model.__dict__, config=_with_flex_attention(model.config))
    # Without compilation: what is made here is small, and thrown away.
    with torch.compiler.set_stance("force_eager"):
        masks = asked.get_attention_masks(positions=positions)
    return pytree.tree_map(
        lambda mask: _written_out(mask, positions, type(model).__name__),
        masks,
        is_leaf=lambda value: isinstance(value, BlockMask),
    )


def _with_flex_attention(config: Any) -> Any:
    changed = copy.copy(config)
    changed.layers = [
        layer
        if getattr(layer, "attention", None) is None
        else replace(
            layer, attention=replace(layer.attention, inner_attention=FlexAttention.Config())
        )
        for layer in config.layers
    ]
    return changed


def _written_out(mask: object, positions: torch.Tensor, model: str) -> torch.Tensor:
    if not isinstance(mask, BlockMask):
        raise OwnMasksError(
            f"{model} makes a mask of type {type(mask).__name__}; allowed: BlockMask, of which "
            "attention on cpu takes what it lets each token see"
        )
    num_samples, length = positions.shape
    return create_mask(
        mask.mask_mod, num_samples, None, length, length, device=str(positions.device)
    )
