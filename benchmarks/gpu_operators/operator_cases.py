"""What is timed: dense, float8 and grouped products, and causal attention by each kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from calibration.machine import causal_flex_attention
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gt_passes.simulation import MatmulShape, OpWork

_PRODUCTS = ((8192, 8192, 8192), (8192, 14336, 4096), (8192, 4096, 14336), (16384, 4096, 4096))
_GROUPED = ((16384, 8192, 5120, 16), (65536, 2048, 7168, 8), (49152, 1408, 2048, 64))
_LENGTHS = (8192, 32768)
_HEADS, _HEAD_DIM = 32, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call, and what the cost model takes it for."""

    work: OpWork
    masked: bool
    run: Callable[[], object]


def operator_cases(
    device: torch.device, *, shrink: int = 1
) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names and makers of cases; one's tensors are gone before the next one's are made.

    Args:
        device: a GPU; what it lacks fails when it is made or run.
        shrink: divides sizes, for trials of this file.
    """
    for shape in _PRODUCTS:
        m, n, k = (size // shrink for size in shape)
        yield f"mm, bfloat16, {m}x{n}x{k}", partial(_product, device, m, n, k)
        for rows in (False, True):
            name = f"_scaled_mm, float8 {'row' if rows else 'tensor'}-wise, {m}x{n}x{k}"
            yield name, partial(_float8_product, device, m, n, k, by_rows=rows)
    for *shape, groups in _GROUPED:
        m, n, k = (size // shrink for size in shape)
        name = f"_grouped_mm, bfloat16, {m}x{n}x{k}, {groups} equal groups"
        yield name, partial(_grouped, device, m, n, k, groups)
    for length in _LENGTHS:
        for kernel, make in _ATTENTIONS.items():
            for backward in (False, True):
                name = f"{kernel}, causal, {_HEADS} heads of {_HEAD_DIM}, {length // shrink} tokens"
                yield (
                    f"{name}, {'backward' if backward else 'forward'}",
                    partial(_attention, device, make, length // shrink, backward=backward),
                )


def _random(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def _product(device: torch.device, m: int, n: int, k: int) -> Case:
    left, right = _random(device, m, k), _random(device, n, k).t()
    work = _product_work(m, n, k, torch.bfloat16)
    return Case(work=work, masked=False, run=lambda: left @ right)


def _product_work(m: int, n: int, k: int, dtype: torch.dtype, groups: int = 0) -> OpWork:
    matmul = MatmulShape(m // groups, n, k, groups) if groups else MatmulShape(m, n, k)
    return OpWork(
        kind="grouped_matmul" if groups else "matmul",
        flops=matmul.flops,
        matmul=matmul,
        dtype=dtype,
        moved_bytes=(m * k + max(groups, 1) * n * k) * dtype.itemsize + 2 * m * n,
    )


def _float8_product(device: torch.device, m: int, n: int, k: int, *, by_rows: bool) -> Case:
    left = _random(device, m, k).to(torch.float8_e4m3fn)
    right = _random(device, n, k).to(torch.float8_e4m3fn).t()
    ones = partial(torch.ones, device=device, dtype=torch.float32)
    scales = (ones(m, 1), ones(1, n)) if by_rows else (ones(()), ones(()))

    def run() -> torch.Tensor:
        return torch._scaled_mm(left, right, *scales, out_dtype=torch.bfloat16, use_fast_accum=True)

    return Case(work=_product_work(m, n, k, torch.float8_e4m3fn), masked=False, run=run)


def _grouped(device: torch.device, m: int, n: int, k: int, groups: int) -> Case:
    left, right = _random(device, m, k), _random(device, groups, k, n)
    ends = torch.arange(1, groups + 1, device=device, dtype=torch.int32) * (m // groups)
    work = _product_work(m, n, k, torch.bfloat16, groups)
    return Case(work=work, masked=False, run=lambda: torch._grouped_mm(left, right, ends))


MakeAttention = Callable[[torch.device, int], Callable[..., Any]]
"""From the device and the length to a causal attention of queries, keys and values."""


def _by_backend(backend: SDPBackend) -> MakeAttention:
    def make(device: torch.device, length: int) -> Callable[..., Any]:
        def attend(*qkv: torch.Tensor) -> Any:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*qkv, is_causal=True)

        return attend

    return make


def _default(device: torch.device, length: int) -> Callable[..., Any]:
    return partial(F.scaled_dot_product_attention, is_causal=True)


_ATTENTIONS: Mapping[str, MakeAttention] = {
    "FlexAttention, compiled": causal_flex_attention,
    "SDPA, as it chooses": _default,
    "SDPA, FlashAttention": _by_backend(SDPBackend.FLASH_ATTENTION),
    "SDPA, cuDNN": _by_backend(SDPBackend.CUDNN_ATTENTION),
}


def _attention(device: torch.device, make: MakeAttention, length: int, *, backward: bool) -> Case:
    attend = make(device, length)
    q, k, v, gradient = (_random(device, 1, _HEADS, length, _HEAD_DIM) for _ in range(4))
    leaves = [each.requires_grad_() for each in (q, k, v)]
    output = attend(*leaves) if backward else None

    def run() -> object:
        if output is not None:
            return torch.autograd.grad(output, leaves, gradient, retain_graph=True)
        with torch.no_grad():
            return attend(*leaves)

    work = OpWork(
        kind="attention_backward" if backward else "attention_forward",
        flops=2 * _HEADS * length**2 * _HEAD_DIM * (5 if backward else 2),
        dtype=torch.bfloat16,
        moved_bytes=(3 if backward else 1) * 4 * q.numel() * 2,
    )
    return Case(work=work, masked=True, run=run)
