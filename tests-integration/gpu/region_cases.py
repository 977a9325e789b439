"""Operators with kernels of their own: FlexAttention, and products fused with communication."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from gpu.sites import Site
from torch.distributed import _symmetric_memory
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from gt_config import CompileConfig
from gt_passes import (
    AsyncTensorParallel,
    CompileFlexAttention,
    InductorCompiler,
    PassContext,
    PassManager,
    default_passes,
)
from gt_trace import flex_attention_on_cpu
from gt_trace.capture.trace import trace_step
from gt_trace.capture.traced_step import TracedStep

Results = tuple[torch.Tensor, ...]

# Older torch has the second names only, and newer torch warns of them.
_OLD = not hasattr(functional_collectives, "all_gather_single")
_all_gather = getattr(functional_collectives, "all_gather_tensor" if _OLD else "all_gather_single")
_reduce_scatter = getattr(
    functional_collectives, "reduce_scatter_tensor" if _OLD else "reduce_scatter_single"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexAttentionResults:
    """Output and gradients of query, key and value, from the same inputs."""

    region: Results
    """Of the captured graph whose operators were compiled."""

    compiled: Results
    """Of an eager model that compiles FlexAttention itself. On a CPU as ``dense``: it has no
    compiled backward."""

    dense: Results
    """Operator by operator, with every score in memory."""

    num_regions: int


def flex_attention_both_ways(site: Site) -> FlexAttentionResults:
    length, heads, head_dim = (1024, 8, 64) if site.large else (128, 2, 16)
    shape = (2, heads, length, head_dim)
    q, k, v, gradient = (torch.randn(shape, device=site.device) for _ in range(4))
    mask = create_block_mask(_is_causal, None, None, length, length, device=str(site.device))
    with flex_attention_on_cpu() if not site.large else contextlib.nullcontext():
        dense = _attend(flex_attention, q, k, v, gradient, mask)
        compiled = dense
        if site.large:
            compiled = _attend(torch.compile(flex_attention), q, k, v, gradient, mask)
        step = trace_step(lambda *args: _attend(flex_attention, *args))(q, k, v, gradient, mask)
    context = PassContext(fake_mode=step.fake_mode, static_input_names=())
    # As eager compiles it: without eager's rounding between the operators inside.
    compiler = InductorCompiler(eager_rounding=False) if site.large else site.compiler
    manager = PassManager([CompileFlexAttention(compiler=compiler)], context=context)
    (record,) = manager.run(step.graph_module).records
    return FlexAttentionResults(
        region=step.bind()(q, k, v, gradient, mask),
        compiled=compiled,
        dense=dense,
        num_regions=record.report.counts["regions"],
    )


def _attend(
    attention: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gradient: torch.Tensor,
    mask: BlockMask,
) -> Results:
    leaves = [each.detach().requires_grad_() for each in (q, k, v)]
    output = attention(*leaves, block_mask=mask)
    return output.detach(), *torch.autograd.grad(output, leaves, gradient)


def _is_causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


def relative_difference(first: Results, second: Results) -> float:
    """The largest difference of any tensor, relative to its largest element."""
    return max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(first, second, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncTensorParallelResults:
    plain: list[torch.Tensor]
    fused: list[torch.Tensor]
    counts: dict[str, int]
    refusals: list[str]


def async_tensor_parallel_on_one_rank(site: Site) -> AsyncTensorParallelResults:
    """A tensor-parallel layer whose group is this rank alone, plain and fused.

    What one GPU can show: that the pass finds symmetric memory, that the fused operators take what
    it gives them, and that they compute the products. It cannot show that ranks read each other's
    memory, nor what that hides.
    """
    tokens, dim = (1024, 512) if site.large else (8, 4)
    with site.one_rank_groups():
        _enable_symmetric_memory(site)
        x, w1, w2 = (
            torch.randn(shape, device=site.device)
            for shape in ((1, tokens, dim), (dim, 2 * dim), (2 * dim, dim))
        )
        graph_module = make_fx(_tensor_parallel_layer, tracing_mode="fake")(x, w1, w2)
        plain = list(graph_module(x, w1, w2))
        context = PassContext.from_graph(graph_module)
        options = {} if site.large else {"symmetric_memory": _Everywhere()}
        manager = PassManager([AsyncTensorParallel(**options)], context=context)
        (record,) = manager.run(graph_module).records
        if not site.large:
            _replace_by_meaning(graph_module)
        fused = list(graph_module(x, w1, w2))
        site.synchronize()
    return AsyncTensorParallelResults(
        plain=plain,
        fused=fused,
        counts=dict(record.report.counts),
        refusals=list(map(str, record.report.refusals)),
    )


def _tensor_parallel_layer(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
) -> list[torch.Tensor]:
    """Gather tokens, a product; a product, scatter tokens. ``x`` is (1, T, D)."""
    group = dist.group.WORLD.group_name
    gathered = _all_gather(x, 1, group)
    hidden = (gathered.reshape(-1, gathered.shape[-1]) @ w1).sigmoid()
    product = (hidden @ w2).view(*gathered.shape[:-1], -1)
    return [_reduce_scatter(product, "sum", 1, group) + 0]


def _enable_symmetric_memory(site: Site) -> None:
    """Older torch wants to be told which groups use it."""
    enable = getattr(_symmetric_memory, "enable_symm_mem_for_group", None)
    if site.large and enable is not None:
        enable(dist.group.WORLD.group_name)


def _replace_by_meaning(graph_module: GraphModule) -> None:
    """The fused operators exist on GPUs only; torch defines their meaning beside them."""
    meaning = {
        torch.ops.symm_mem.fused_all_gather_matmul.default: (
            _symmetric_memory._fused_all_gather_matmul_fallback
        ),
        torch.ops.symm_mem.fused_matmul_reduce_scatter.default: (
            _symmetric_memory._fused_matmul_reduce_scatter_fallback
        ),
    }
    for node in graph_module.graph.nodes:
        node.target = meaning.get(node.target, node.target)
    graph_module.recompile()


class _Everywhere:
    """Symmetric memory in every group, on a CPU that has none."""

    def reason_against(self, group_name: str) -> str | None:
        return None


class FlashAttention(torch.autograd.Function):
    """Causal attention by the operators that ``F.scaled_dot_product_attention`` calls on a GPU.

    They can be captured on any device, and run on a GPU alone.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        results = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        output, logsumexp, *ctx.lengths, seed, offset, _ = results
        ctx.save_for_backward(q, k, v, output, logsumexp, seed, offset)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Results:
        q, k, v, output, logsumexp, seed, offset = ctx.saved_tensors
        saved = (q, k, v, output, logsumexp, *ctx.lengths)
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient, *saved, 0.0, True, seed, offset
        )


def flash_attention_step(device: torch.device) -> TracedStep:
    """A captured step whose attention is that of a GPU: output and gradients."""
    q, k, v, gradient = (
        torch.randn(1, 4, 256, 64, device=device, dtype=torch.bfloat16) for _ in range(4)
    )

    def step(*args: torch.Tensor) -> Results:
        leaves = [each.detach().requires_grad_() for each in args[:3]]
        output = FlashAttention.apply(*leaves)
        return output.detach(), *torch.autograd.grad(output, leaves, args[3])

    return trace_step(step)(q, k, v, gradient)


def scaled_dot_product_attention_captured(site: Site) -> tuple[Results, Results]:
    """Output and gradients of PyTorch's own attention, captured and eager."""
    q, k, v, gradient = (
        torch.randn(1, 4, 256, 64, device=site.device, dtype=torch.bfloat16) for _ in range(4)
    )

    def step(*args: torch.Tensor) -> Results:
        leaves = [each.detach().requires_grad_() for each in args[:3]]
        output = F.scaled_dot_product_attention(*leaves, is_causal=True)
        return output.detach(), *torch.autograd.grad(output, leaves, args[3])

    traced = trace_step(step)(q, k, v, gradient)
    passes = default_passes(CompileConfig(inductor_compilation="none"), graph="STEP")
    PassManager(passes, context=PassContext.of_step(traced)).run(traced.graph_module)
    return traced.bind()(q, k, v, gradient), step(q, k, v, gradient)
