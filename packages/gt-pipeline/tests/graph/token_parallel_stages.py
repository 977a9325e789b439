"""Stages of sequence parallelism, and runs of them. Workers import this module by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from stage_models import ACTIVATION, WIDTH
from torch import Tensor, nn
from torch.distributed import _symmetric_memory
from torch.fx import GraphModule

from gt_config.node_keys import PipelineAction
from gt_passes import AsyncTensorParallel, PassContext, PassManager
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.graph.executables import GraphTransform
from gt_pipeline.runner import MicrobatchInputs

_functional = torch.ops._c10d_functional


def _gathered(x: Tensor) -> Tensor:
    group, size = dist.group.WORLD.group_name, dist.get_world_size()
    return _functional.wait_tensor(_functional.all_gather_into_tensor(x.contiguous(), size, group))


def _scattered(x: Tensor) -> Tensor:
    group, size = dist.group.WORLD.group_name, dist.get_world_size()
    launched = _functional.reduce_scatter_tensor(x.contiguous(), "sum", size, group)
    return _functional.wait_tensor(launched)


class Gather(torch.autograd.Function):
    """The rows of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _gathered(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _scattered(gradient)


class Scatter(torch.autograd.Function):
    """The sum over ranks, of which each keeps its rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _scattered(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _gathered(gradient)


class TokenParallelBlock(nn.Module):
    """A feed-forward whose columns and rows lie on the ranks, between rows of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 6, bias=False)
        self.down = nn.Linear(6, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + Scatter.apply(self.down(torch.sigmoid(self.up(Gather.apply(x)))))


class Everywhere:
    """Symmetric memory in every group."""

    def reason_against(self, group_name: str) -> str | None:
        return None


def fusing(counts: dict[PipelineAction, dict[str, int]]) -> GraphTransform:
    """A transform that fuses collectives and products, and counts by action what it fused."""

    def transform(graph_module: GraphModule, kind: PipelineAction, context: PassContext) -> None:
        passes = [AsyncTensorParallel(symmetric_memory=Everywhere())]
        (record,) = PassManager(passes, context=context).run(graph_module).records
        counts[kind] = dict(record.report.counts)

    return transform


def token_parallel_stage(transform: GraphTransform | None = None) -> GraphPipelineStage:
    torch.manual_seed(dist.get_rank())
    return GraphPipelineStage(
        TokenParallelBlock(),
        stage_index=1,
        num_stages=3,
        activations=[ACTIVATION],
        transform=transform,
    )


def differences_of_fused_stages() -> list[float]:
    """The largest difference of each output and gradient to those of the stage as captured."""
    # The operators themselves exist on GPUs only; torch defines their meaning beside them.
    library = torch.library.Library("symm_mem", "IMPL")  # of this worker alone
    library.impl(
        "fused_all_gather_matmul", _symmetric_memory._fused_all_gather_matmul_fallback, "CPU"
    )
    library.impl(
        "fused_matmul_reduce_scatter",
        _symmetric_memory._fused_matmul_reduce_scatter_fallback,
        "CPU",
    )
    try:
        return [
            (a - b).abs().max().item()
            for plain, fused in ((list(_trained(None)), list(_trained(fusing({})))),)
            for a, b in zip(plain, fused, strict=True)
        ]
    finally:
        library._destroy()


def _trained(transform: GraphTransform | None) -> Iterator[Tensor]:
    """Two microbatches, the second in halves, and a pair of both."""
    stage = token_parallel_stage(transform)
    generator = torch.Generator().manual_seed(7 + dist.get_rank())

    def rows() -> tuple[Tensor, ...]:
        return (torch.randn(ACTIVATION.shape, generator=generator),)

    for number in range(2):
        yield from stage.forward(number, rows(), MicrobatchInputs())
    yield from stage.full_backward(0, rows())
    yield from stage.backward_input(1, rows())
    stage.backward_weight(1)
    yield from stage.forward(2, rows(), MicrobatchInputs())
    outputs, gradients = stage.overlap(
        3,
        rows(),
        MicrobatchInputs(),
        backward_stage=stage,
        backward_kind="FULL_BACKWARD",
        backward_microbatch=2,
        output_gradients=rows(),
    )
    yield from (*outputs, *gradients)
    stage.reduce_gradients()
    yield from stage.gradients().values()
    stage.discard()
