"""Steps of tensor parallelism, for the tests of ``AsyncTensorParallel`` and their workers."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from pass_graphs import capture, run_pass
from torch.distributed import _symmetric_memory
from torch.fx import GraphModule

from gt_passes import AsyncTensorParallel

# Older torch has the second names only, and newer torch warns of them.
_OLD = not hasattr(functional_collectives, "all_gather_single")
all_gather = getattr(functional_collectives, "all_gather_tensor" if _OLD else "all_gather_single")
reduce_scatter = getattr(
    functional_collectives, "reduce_scatter_tensor" if _OLD else "reduce_scatter_single"
)


class Everywhere:
    """Symmetric memory in every group."""

    def reason_against(self, group_name: str) -> str | None:
        return None


def world() -> str:
    return dist.group.WORLD.group_name


def feed_forward(x, w1, w3, w2, gradient):
    """Gather tokens, two products; a product, scatter tokens; and a weight gradient."""
    gathered = all_gather(x, 1, world())
    tokens = gathered.reshape(-1, gathered.shape[-1])
    hidden = (tokens @ w1).sigmoid() * (tokens @ w3)
    product = (hidden @ w2).view(*gathered.shape[:-1], -1)
    scattered = reduce_scatter(product, "sum", 1, world())
    return scattered + 0, gradient.t() @ tokens


def inputs(batch_size: int) -> list[torch.Tensor]:
    """For ``feed_forward`` on two ranks: 4 of 8 tokens here, dims 4 and 6."""
    shapes = [(batch_size, 4, 4), (4, 6), (4, 6), (6, 4), (batch_size * 8, 3)]
    return [torch.randn(shape) for shape in shapes]


def fuse(graph_module: GraphModule):
    return run_pass(AsyncTensorParallel(symmetric_memory=Everywhere()), graph_module)


def scaled(x, w, *, scales_of_rows, bias=None, dim=1):
    """A product in float8 of tokens, reduced and scattered along them; scales for one or all rows."""
    tokens = x.reshape(-1, x.shape[-1])
    dims = {"dim": 1, "keepdim": True} if scales_of_rows else {}
    scale = tokens.abs().amax(**dims).clamp(min=1e-3) / 448
    weight_scale = w.abs().amax(**({"dim": 0, "keepdim": True} if scales_of_rows else {})) / 448
    product = torch._scaled_mm(
        (tokens / scale).to(torch.float8_e4m3fn),
        (w / weight_scale).t().contiguous().to(torch.float8_e4m3fn).t(),
        scale,
        weight_scale,
        bias=bias,
        out_dtype=torch.bfloat16,
    )
    return reduce_scatter(product.view(*x.shape[:-1], -1), "sum", dim, world()) + 0


def scaled_by_tensors(x, w):
    return scaled(x, w, scales_of_rows=False)


def scaled_by_rows(x, w):
    return scaled(x, w, scales_of_rows=True)


def scaled_inputs() -> list[torch.Tensor]:
    """For ``scaled`` on two ranks: two samples of 8 tokens, dims 32 and 16."""
    return [torch.randn(2, 8, 32), torch.randn(32, 16)]


MEANINGS = {
    torch.ops.symm_mem.fused_all_gather_matmul.default: (
        _symmetric_memory._fused_all_gather_matmul_fallback
    ),
    torch.ops.symm_mem.fused_matmul_reduce_scatter.default: (
        _symmetric_memory._fused_matmul_reduce_scatter_fallback
    ),
    torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter.default: (
        _symmetric_memory._fused_scaled_matmul_reduce_scatter_fallback
    ),
}
"""The operators themselves exist on GPUs only; torch defines their meaning beside them."""


def with_meaning(fused: GraphModule) -> GraphModule:
    for node in fused.graph.nodes:
        node.target = MEANINGS.get(node.target, node.target)
    fused.recompile()
    return fused


def scaled_outputs_plain_and_fused() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Results of this rank, with scales of tensors and of rows."""
    results = []
    for of_rows in (False, True):
        torch.manual_seed(dist.get_rank())
        values = scaled_inputs()
        plain = capture(scaled_by_rows if of_rows else scaled_by_tensors, *values)
        fused = copy.deepcopy(plain)
        assert fuse(fused).counts == {"reduce_scatters_fused": 1}
        results.append((plain(*values), with_meaning(fused)(*values)))
    return results


def outputs_plain_and_fused() -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Results of this rank, the fused operators replaced by what they mean."""
    results = []
    for batch_size in (1, 2):
        torch.manual_seed(dist.get_rank())
        values = inputs(batch_size)
        plain = capture(feed_forward, *values)
        fused = copy.deepcopy(plain)
        assert fuse(fused).counts == {"all_gathers_fused": 1, "reduce_scatters_fused": 1}
        results.append((list(plain(*values)), list(with_meaning(fused)(*values))))
    return results
