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


def outputs_plain_and_fused() -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Results of this rank, the fused operators replaced by what they mean."""
    results = []
    for batch_size in (1, 2):
        torch.manual_seed(dist.get_rank())
        values = inputs(batch_size)
        plain = capture(feed_forward, *values)
        fused = copy.deepcopy(plain)
        assert fuse(fused).counts == {"all_gathers_fused": 1, "reduce_scatters_fused": 1}
        # The operators themselves exist on GPUs only; torch defines their meaning beside them.
        meaning = {
            torch.ops.symm_mem.fused_all_gather_matmul.default: (
                _symmetric_memory._fused_all_gather_matmul_fallback
            ),
            torch.ops.symm_mem.fused_matmul_reduce_scatter.default: (
                _symmetric_memory._fused_matmul_reduce_scatter_fallback
            ),
        }
        for node in fused.graph.nodes:
            node.target = meaning.get(node.target, node.target)
        fused.recompile()
        results.append((list(plain(*values)), list(fused(*values))))
    return results
