"""Attention for machines without FlexAttention, and how FlexAttention is compiled for the others.

torchtitan 0.3.0 gives its language models FlexAttention or varlen attention. Neither has a backward
on CPU, and torchtitan's own scaled-dot-product module takes no mask, so that documents packed into
one sample would see each other. On CPU, and in configurations named ``sdpa``, we therefore replace
the *configuration* of each layer's inner attention, which becomes a scaled dot product with a
per-document mask; the attention block around it stays torchtitan's
(``torchtitan/models/common/attention.py``).

On GPUs the other models attend with FlexAttention as published, which they compile by Inductor also
when all else runs eagerly. A captured graph has the bare operator, so its recipe compiles that
again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.protocols.module import Module

from gt_trainer.decoder.own_masks import makes_own_masks, own_masks
from gt_trainer.device import intended_device_type

if TYPE_CHECKING:
    from torchtitan.protocols.model import BaseModel

_FOR_EAGER_ONLY = frozenset({"wrap_inductor_compiled_regions"})
"""Options by which eager checkpointing sees what Inductor compiled; a graph has its regions."""


class AttentionMaskError(ValueError):
    """A mask or the positions it is built from have the wrong type or shape."""

    @classmethod
    def without_positions(cls) -> AttentionMaskError:
        """The error of a batch that does not say where its documents begin."""
        return cls(
            "the model attends within documents, but the batch holds no 'positions': the data "
            "loader must give the position of each token in its document, shape (batch, sequence)"
        )


def document_causal_mask(
    positions: torch.Tensor,
    *,
    queries: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """Say which tokens each token may attend to: itself and earlier ones of its own document.

    Args:
        positions: (B, L) integers, the position of each token in its document. A 0 starts a new
            document, as in torchtitan's ``get_document_mask_mod``. What precedes the first 0 of a
            sample, the rest of a document that began earlier, is a document too.
        queries: (B, Lq) indices of the tokens that attend, in any order; None for all, in theirs.
        keys: (B, Lk) indices of the tokens that are attended to, likewise.

    Returns:
        (B, 1, Lq, Lk) bool on the device of ``positions``; [b, 0, q, k] is True where q attends to
        k.

    Raises:
        AttentionMaskError: ``positions`` is not two-dimensional.
    """
    if positions.ndim != 2:
        raise AttentionMaskError(
            f"positions have shape {tuple(positions.shape)}; allowed: (batch, sequence)"
        )
    document_BL = torch.cumsum((positions == 0).to(torch.int32), dim=1)
    token_L = torch.arange(positions.shape[1], device=positions.device).unsqueeze(0)
    query_BQ, key_BK = (token_L if given is None else given for given in (queries, keys))
    document_BQ, document_BK = (
        document_BL if given is None else document_BL.gather(1, given) for given in (queries, keys)
    )
    same_document_BQK = document_BQ.unsqueeze(2) == document_BK.unsqueeze(1)
    causal_BQK = query_BQ.unsqueeze(2) >= key_BK.unsqueeze(1)
    return (same_document_BQK & causal_BQK).unsqueeze(1)


OutTransform = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class DocumentCausalSDPA(Module):
    """Inner attention by ``F.scaled_dot_product_attention`` under a (B, 1, Lq, Lk) boolean mask.

    The mask is that of documents, or what the model makes of it for some layers (``own_masks``).
    There are more keys than queries where ranks share a sequence.

    Always one kernel of a device, or an error: eager execution and a captured graph then hold the
    same operator. On CPUs it is torch's flash attention. It parallelizes over batch and heads,
    forward and backward, and sums within a head in a fixed order, hence the same bits. It wants
    values as wide as queries; where they are narrower (multi-head latent attention), values are
    padded with zero columns and the output is cut, which changes no kept number. On GPUs it is
    memory-efficient attention, the fused kernel there that takes a mask; it has no grouped queries,
    so that key-value heads are repeated.

    The names of the first three arguments are those that torchtitan's sharding configurations
    refer to; under tensor parallelism the module then runs inside their ``local_map``, on the local
    heads, and the mask passes through unchanged.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """No options: the mask comes with the batch."""

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: torch.Tensor,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: OutTransform | None = None,
    ) -> torch.Tensor:
        """Attend within documents.

        Args:
            q_BLNH: (B, Lq, heads, width) queries.
            k_BLNH: (B, Lk, key-value heads, width) keys.
            v_BLNH: (B, Lk, key-value heads, value width) values; not wider than the queries.
            attention_masks: (B, 1, Lq, Lk) bool from ``document_causal_mask``.
            scale: Factor on the scores; None is 1 / sqrt(width).
            enable_gqa: Whether there are fewer key-value heads than heads.
            out_transform: Given the output and (B, Lq, heads) logarithms of the sums of exponential
                scores, returns the output in its place. The flash kernel's sums have no gradient,
                so attention is then written out.

        Returns:
            (B, Lq, heads, value width).

        Raises:
            AttentionMaskError: No such mask was given.
        """
        _check_mask(attention_masks, (q_BLNH.shape[0], 1, q_BLNH.shape[1], k_BLNH.shape[1]))
        if out_transform is not None:
            out_BLNH, lse_BLN = _attend_with_sums(q_BLNH, k_BLNH, v_BLNH, attention_masks, scale)
            return out_transform(out_BLNH, lse_BLN)
        value_width = v_BLNH.shape[-1]
        padding = q_BLNH.shape[-1] - value_width
        if padding > 0:
            v_BLNH = F.pad(v_BLNH, (0, padding))
        kernel = SDPBackend.FLASH_ATTENTION
        if q_BLNH.device.type == "cuda":
            kernel, enable_gqa = SDPBackend.EFFICIENT_ATTENTION, False
            num_groups = q_BLNH.shape[2] // k_BLNH.shape[2]
            if num_groups > 1:
                k_BLNH = k_BLNH.repeat_interleave(num_groups, dim=2)
                v_BLNH = v_BLNH.repeat_interleave(num_groups, dim=2)
        with sdpa_kernel(kernel):
            out_BNLH = F.scaled_dot_product_attention(
                q_BLNH.transpose(1, 2),
                k_BLNH.transpose(1, 2),
                v_BLNH.transpose(1, 2),
                attn_mask=attention_masks,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        if padding > 0:
            out_BNLH = out_BNLH[..., :value_width]
        return out_BNLH.transpose(1, 2)


def replace_inner_attention(model_config: BaseModel.Config) -> tuple[str, ...]:
    """Make every layer of a decoder's configuration use ``DocumentCausalSDPA``, in place.

    Returns:
        The names of the attention classes that were replaced, sorted; empty if there were none.
    """
    found = [
        match
        for attention in (FlexAttention, VarlenAttention)
        for match in model_config.traverse(attention.Config)
    ]
    for fqn, _, parent, field in found:
        if parent is None or not isinstance(field, str):
            raise TypeError(
                f"the attention configuration at {fqn!r} is not the field of another configuration"
            )
        setattr(parent, field, DocumentCausalSDPA.Config())
    return tuple(sorted({type(config).__qualname__.split(".")[0] for _, config, _, _ in found}))


def has_document_mask(model_config: object) -> bool:
    """Whether a model attends by ``DocumentCausalSDPA``: with a mask of all pairs of tokens."""
    attention = getattr(model_config, "first_attention", None)
    return isinstance(getattr(attention, "inner_attention", None), DocumentCausalSDPA.Config)


def attends_with_flex_attention(model_config: object) -> bool:
    """Whether a model attends with torchtitan's FlexAttention, under its ``BlockMask``."""
    attention = getattr(model_config, "first_attention", None)
    return isinstance(getattr(attention, "inner_attention", None), FlexAttention.Config)


def attention_mask_for(model: Any, positions: torch.Tensor | None) -> Any:
    """Build the mask of one batch for a model whose inner attention is ours, else return None.

    Args:
        model: A decoder, as built by torchtitan.
        positions: (B, L) positions in the document, or None where the batch has none.

    Returns:
        (B, 1, L, L) bool; of a model that makes its own masks, these, however it keeps them.

    Raises:
        AttentionMaskError: The model needs a mask and the batch has no positions.
        OwnMasksError: The model makes masks that cannot be written out.
    """
    if not has_document_mask(model.config):
        return None
    if positions is None:
        raise AttentionMaskError.without_positions()
    if makes_own_masks(model.config):
        return own_masks(model, positions)
    return document_causal_mask(positions)


def flex_attention_options() -> dict[str, object] | None:
    """The options with which torchtitan compiles FlexAttention for eager runs on this device.

    They depend on whether the run is to be deterministic, which torchtitan's trainer settles when
    it is built: ask after that.

    Returns:
        Names and values of ``torch._inductor.config``; None where eager runs do not compile it: on
        CPUs, whose models attend otherwise, and on ROCm if the run is to be deterministic.
    """
    if intended_device_type() == "cpu" or FlexAttention._compiled_flex_attn is flex_attention:
        return None
    options = FlexAttention.inductor_configs.items()
    return {name: value for name, value in options if name not in _FOR_EAGER_ONLY}


def _attend_with_sums(
    q_BLNH: torch.Tensor,
    k_BLNH: torch.Tensor,
    v_BLNH: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in the operators that it is made of: the output, and its sums as logarithms."""
    num_groups = q_BLNH.shape[2] // k_BLNH.shape[2]
    q_BNLH, k_BNLH, v_BNLH = (
        each.transpose(1, 2)
        for each in (
            q_BLNH,
            k_BLNH.repeat_interleave(num_groups, dim=2),
            v_BLNH.repeat_interleave(num_groups, dim=2),
        )
    )
    factor = q_BLNH.shape[-1] ** -0.5 if scale is None else scale
    scores_BNQK = q_BNLH @ k_BNLH.transpose(2, 3)
    scores_BNQK = scores_BNQK.to(torch.promote_types(scores_BNQK.dtype, torch.float32)) * factor
    scores_BNQK = scores_BNQK.masked_fill(~mask, -torch.inf)
    lse_BNQ = torch.logsumexp(scores_BNQK, dim=-1)
    weights_BNQK = torch.exp(scores_BNQK - lse_BNQ.unsqueeze(-1)).to(v_BNLH.dtype)
    return (weights_BNQK @ v_BNLH).transpose(1, 2), lse_BNQ.transpose(1, 2)


def _check_mask(mask: object, shape: tuple[int, ...]) -> None:
    wanted = f"a bool tensor of shape {shape}"
    if not isinstance(mask, torch.Tensor):
        raise AttentionMaskError(
            f"attention_masks is {type(mask).__name__}; allowed: {wanted}, from "
            "document_causal_mask(positions)"
        )
    if mask.dtype != torch.bool or tuple(mask.shape) != shape:
        raise AttentionMaskError(
            f"attention_masks has dtype {mask.dtype} and shape {tuple(mask.shape)}; allowed: "
            f"{wanted}, from document_causal_mask(positions)"
        )
