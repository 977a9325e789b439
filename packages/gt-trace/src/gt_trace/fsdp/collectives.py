"""Gathering one sharded parameter, and reducing its gradient: one autograd function.

The forward of the function is the unshard, its backward the reduction, both on plain local
tensors with functional collectives, so that a trace records them and eager execution runs the very
same operators. What is cast, padded and reduced, and in which order, follows torch's FSDP2
(torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py) one parameter at a time. Parts of a
gradient on tensor-parallel ranks are summed after the cast, as by torch 2.15's FSDP2 and whenever
gradients accumulate (earlier versions sum before it otherwise): microbatches add up in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from gt_config.node_keys import FsdpCollectiveAnnotation, FsdpCollectiveKind
from gt_trace.annotate import annotate

GradientReduction = Literal["avg", "sum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardAxis:
    """One mesh axis, as a collective needs it."""

    name: str
    group_name: str
    num_ranks: int
    rank: int
    """This process's coordinate on the axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnshardPlan:
    """Everything about one parameter that its collectives need."""

    parameter_names: tuple[str, ...]
    shard_axis: ShardAxis | None
    """The axis over which the parameter is sharded; None if every rank holds it whole."""

    replicate_axis: ShardAxis | None
    """The axis over which shards are replicated, hence gradients all-reduced; None for none."""

    shard_dim: int
    """Tensor dimension that is split."""

    size: int
    """Extent of the sharded dimension when whole, on this rank's tensor-parallel part."""

    param_dtype: torch.dtype | None
    """Dtype in which the gathered parameter is computed with; None: as stored."""

    reduce_dtype: torch.dtype | None
    """Dtype in which gradients are reduced; None: as stored."""

    reduction: GradientReduction

    @property
    def chunk(self) -> int:
        """Extent of the largest shard, to which the others are padded."""
        num_ranks = 1 if self.shard_axis is None else self.shard_axis.num_ranks
        return -(-self.size // num_ranks)

    @property
    def local_size(self) -> int:
        """Extent of this rank's shard; the last ranks may have less, or nothing."""
        start = 0 if self.shard_axis is None else self.shard_axis.rank * self.chunk
        return max(0, min(self.chunk, self.size - start))

    @property
    def num_ranks(self) -> int:
        """Ranks whose gradients are reduced together."""
        product = 1
        for axis in (self.shard_axis, self.replicate_axis):
            product *= 1 if axis is None else axis.num_ranks
        return product

    def __deepcopy__(self, memo: dict[int, Any]) -> UnshardPlan:
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerPlacement:
    """The tensor- or expert-parallel DTensor that a gathered parameter is."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    """Of the whole tensor, over all ranks of ``mesh``; likewise ``stride``."""

    stride: tuple[int, ...]

    def wrap(self, local: torch.Tensor) -> DTensor:
        """Make the DTensor of which this rank has ``local``."""
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )


def unshard(
    shard: torch.Tensor, plan: UnshardPlan, inner: InnerPlacement | None = None
) -> torch.Tensor:
    """Gather a parameter; differentiable.

    Args:
        shard: this rank's plain local tensor, of extent ``plan.local_size`` along the shard dim.
        plan: as for the parameter.
        inner: how other parallelism places what is gathered; None for a plain tensor.

    Returns:
        The whole tensor in the compute dtype. Its gradient is reduced over all data-parallel
        ranks and arrives at ``shard`` in the shard's shape and dtype.
    """
    gathered: torch.Tensor = _Unshard.apply(shard, plan, inner)
    return gathered


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shard: torch.Tensor, plan: UnshardPlan, inner: InnerPlacement | None
    ) -> torch.Tensor:
        ctx.plan = plan
        ctx.inner = inner
        ctx.dtype = shard.dtype
        with annotate(_annotation(plan, "unshard", plan.shard_axis or plan.replicate_axis)):
            value = _cast(shard, plan.param_dtype)
            axis = plan.shard_axis
            if axis is not None and axis.num_ranks > 1:
                value = _all_gather(_pad(value, plan), plan, axis)
            # A function must not return its input; a view of it is enough.
            value = value.view_as(shard) if value is shard else value
        ctx.shape = value.shape
        return value if inner is None else inner.wrap(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        plan: UnshardPlan = ctx.plan
        shard_axis, replicate_axis = plan.shard_axis, plan.replicate_axis
        if ctx.inner is not None and not isinstance(gradient, DTensor):
            # Autograd made zeros of the whole tensor, since no reader gave a gradient.
            gradient = ctx.inner.wrap(gradient.new_zeros(ctx.shape))
        with annotate(_annotation(plan, "reduce_grad", shard_axis or replicate_axis)):
            value = _cast(gradient, plan.reduce_dtype or ctx.dtype)
        if ctx.inner is not None:
            value = _summed_over_inner_ranks(value, plan, ctx.inner)
        with annotate(_annotation(plan, "reduce_grad", shard_axis or replicate_axis)):
            before, after = _divisors(plan, value.dtype)
            if before != 1:
                value = value / before
            if shard_axis is not None and shard_axis.num_ranks > 1:
                value = _reduce_scatter(value, plan, shard_axis)
        if replicate_axis is not None and replicate_axis.num_ranks > 1:
            with annotate(_annotation(plan, "reduce_grad", replicate_axis)):
                # Padded still: every rank of the world then runs collectives of the same sizes.
                value = _all_reduce(value, replicate_axis)
        with annotate(_annotation(plan, "reduce_grad", shard_axis or replicate_axis)):
            if shard_axis is not None and plan.local_size != plan.chunk:
                value = value.narrow(plan.shard_dim, 0, plan.local_size)
            if after != 1:
                value = value / after
            return _cast(value, ctx.dtype), None, None


def _summed_over_inner_ranks(
    gradient: torch.Tensor, plan: UnshardPlan, inner: InnerPlacement
) -> torch.Tensor:
    """This rank's part of a gradient that is placed as its parameter."""
    assert isinstance(gradient, DTensor)
    if gradient.placements == inner.placements:
        return gradient.to_local()
    annotation = FsdpCollectiveAnnotation(
        kind="sum_parts",
        parameter_names=plan.parameter_names,
        mesh_axis=",".join(inner.mesh.mesh_dim_names or ()),
    )
    with annotate(annotation):
        return gradient.redistribute(placements=inner.placements).to_local()


def _divisors(plan: UnshardPlan, dtype: torch.dtype) -> tuple[float, float]:
    """The numbers by which a gradient is divided before and after its reduction.

    float16 overflows easily, so about the square root of the number of ranks goes first. That
    float64 is treated as float16 is FSDP2's choice too.
    """
    factor = float(plan.num_ranks) if plan.reduction == "avg" else 1.0
    if dtype in (torch.float32, torch.bfloat16):
        return 1.0, factor
    before = 1.0
    while factor % before == 0 and factor / before > before:
        before *= 2
    return before, factor / before


def _annotation(
    plan: UnshardPlan, kind: FsdpCollectiveKind, axis: ShardAxis | None
) -> FsdpCollectiveAnnotation:
    return FsdpCollectiveAnnotation(
        kind=kind,
        parameter_names=plan.parameter_names,
        mesh_axis="" if axis is None else axis.name,
    )


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is None or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)


def _pad(shard: torch.Tensor, plan: UnshardPlan) -> torch.Tensor:
    missing = plan.chunk - plan.local_size
    if missing == 0:
        return shard
    return torch.cat([shard, _zeros(shard, plan.shard_dim, missing)], dim=plan.shard_dim)


def _zeros(like: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    shape = list(like.shape)
    shape[dim] = size
    return like.new_zeros(shape)


def _all_gather(shard: torch.Tensor, plan: UnshardPlan, axis: ShardAxis) -> torch.Tensor:
    functional = torch.ops._c10d_functional
    gathered = functional.wait_tensor(
        functional.all_gather_into_tensor(shard.contiguous(), axis.num_ranks, axis.group_name)
    )
    if plan.shard_dim != 0:
        # The collective concatenates along dim 0.
        gathered = torch.cat(gathered.chunk(axis.num_ranks, dim=0), dim=plan.shard_dim)
    if plan.size != plan.chunk * axis.num_ranks:
        gathered = gathered.narrow(plan.shard_dim, 0, plan.size)
    result: torch.Tensor = gathered
    return result


def _reduce_scatter(gradient: torch.Tensor, plan: UnshardPlan, axis: ShardAxis) -> torch.Tensor:
    padding = plan.chunk * axis.num_ranks - plan.size
    dim = plan.shard_dim
    if padding:
        gradient = torch.cat([gradient, _zeros(gradient, dim, padding)], dim=dim)
    if dim != 0:
        gradient = torch.cat(gradient.chunk(axis.num_ranks, dim=dim), dim=0)
    functional = torch.ops._c10d_functional
    reduced = functional.wait_tensor(
        functional.reduce_scatter_tensor(
            gradient.contiguous(), "sum", axis.num_ranks, axis.group_name
        )
    )
    result: torch.Tensor = reduced
    return result


def _all_reduce(gradient: torch.Tensor, axis: ShardAxis) -> torch.Tensor:
    functional = torch.ops._c10d_functional
    reduced: torch.Tensor = functional.wait_tensor(
        functional.all_reduce(gradient.contiguous(), "sum", axis.group_name)
    )
    return reduced
