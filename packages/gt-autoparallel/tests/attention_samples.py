"""Samples of fused attention, with what the kernels for CUDA compute written out for CPU."""

from __future__ import annotations

from typing import Any

import torch
from sample_values import close, ints
from simulated_ranks import Sample

_SEED = torch.zeros(2, dtype=torch.int64)
"""Stands for what a kernel hands on for dropout, which is not used."""


def _scores(q: torch.Tensor, k: torch.Tensor, mask: Any, causal: bool, scale: Any) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~keep, float("-inf"))
    return scores if mask is None else scores + mask


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, causal: bool, scale: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = _scores(q, k, mask, causal, scale)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def _backward(
    gradient: torch.Tensor, tensors: tuple[Any, ...], mask: Any, causal: bool, scale: Any
) -> tuple[torch.Tensor, ...]:
    """Of queries, keys, values and scores."""
    q, k, v = tensors
    weights = _scores(q, k, mask, causal, scale).softmax(-1)
    of_weights = gradient @ v.transpose(-1, -2)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    return (
        of_scores @ k * factor,
        of_scores.transpose(-1, -2) @ q * factor,
        weights.transpose(-1, -2) @ gradient,
        of_scores,
    )


def _flash(
    q: Any,
    k: Any,
    v: Any,
    p: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: Any = None,
) -> Any:
    return (*_forward(q, k, v, None, causal, scale), None, None, 8, 8, _SEED, _SEED, q.new_empty(0))


def _flash_backward(*args: Any, scale: Any = None) -> Any:
    gradient, q, k, v, *_, causal, _, _ = args
    return _backward(gradient, (q, k, v), None, causal, scale)[:3]


def _efficient(
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    lse: bool,
    p: float = 0.0,
    causal: bool = False,
    *,
    scale: Any = None,
) -> Any:
    return (*_forward(q, k, v, bias, causal, scale), _SEED, _SEED)


def _efficient_backward(*args: Any, scale: Any = None) -> Any:
    gradient, q, k, v, bias, _, _, _, _, _, wanted = args  # is_causal is False, which is left out
    *gradients, of_scores = _backward(gradient, (q, k, v), bias, False, scale)
    return (*gradients, of_scores.sum_to_size(bias.shape) if wanted[3] else None)


def _cudnn(
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    lse: bool,
    p: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: Any = None,
) -> Any:
    return (*_forward(q, k, v, bias, causal, scale), None, None, 8, 8, _SEED, _SEED, None)


def _cudnn_backward(*args: Any, scale: Any = None) -> Any:
    gradient, q, k, v, _, _, _, _, bias, *_, causal = args
    return _backward(gradient, (q, k, v), bias, causal, scale)[:3]


_Q, _KV = (2, 4, 4, 2), (2, 4, 4, 2)
_FEWER = (2, 2, 4, 2)
_CPU = "_scaled_dot_product_flash_attention_for_cpu"


def _inputs(keys: tuple[int, ...] = _KV) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return ints(*_Q), ints(*keys), ints(*keys)


def _cpu_pair(keys: tuple[int, ...], causal: bool, mask: torch.Tensor | None) -> tuple[Sample, ...]:
    q, k, v = _inputs(keys)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    out, lse = operator(q, k, v, 0.0, causal, attn_mask=mask)
    return (
        close(_CPU, q, k, v, 0.0, causal, attn_mask=mask),
        close(f"{_CPU}_backward", ints(*_Q), q, k, v, out, lse, 0.0, causal, attn_mask=mask),
    )


def _cuda_samples() -> tuple[Sample, ...]:
    q, k, v = _inputs()
    grouped = _inputs(_FEWER)
    bias, one_bias = ints(2, 1, 4, 4), ints(1, 4, 4, 4)
    out, lse, gradient = ints(*_Q), ints(2, 4, 4), ints(*_Q)
    flash, efficient = (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
    )
    cudnn = "_scaled_dot_product_cudnn_attention"
    return (
        close(flash, *grouped, 0.0, True, stand_in=_flash),
        close(
            f"{flash}_backward",
            *(gradient, q, k, v, out, lse, None, None, 4, 4, 0.0, True, _SEED, _SEED),
            stand_in=_flash_backward,
        ),
        close(efficient, q, k, v, bias, True, stand_in=_efficient),
        close(efficient, q, k, v, None, True, 0.0, True, stand_in=_efficient),
        close(
            f"{efficient}_backward",
            *(gradient, q, k, v, bias, out, lse, _SEED, _SEED, 0.0, [True] * 3 + [False], False),
            stand_in=_efficient_backward,
        ),
        close(
            f"{efficient}_backward",
            *(gradient, q, k, v, one_bias, out, lse, _SEED, _SEED, 0.0, [True] * 4, False),
            stand_in=_efficient_backward,
        ),
        close(cudnn, q, k, v, None, True, 0.0, True, stand_in=_cudnn),
        close(
            f"{cudnn}_backward",
            *(gradient, q, k, v, out, lse, _SEED, _SEED, bias, None, None, 4, 4, 0.0, False),
            stand_in=_cudnn_backward,
        ),
    )


ATTENTION: tuple[Sample, ...] = (
    *_cpu_pair(_KV, False, None),
    *_cpu_pair(_KV, True, None),
    *_cpu_pair(_FEWER, False, ints(2, 1, 4, 4)),
    *_cpu_pair(_KV, False, ints(4, 4)),
    *_cuda_samples(),
)
