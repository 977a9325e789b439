"""How long async tensor parallelism takes: a product that is pipelined with its collective.

PyTorch cuts the product along the ranks and puts the parts on two streams in turn
(``torch/distributed/_symmetric_memory/__init__.py``): while a part is multiplied, the GPU's copy
engine reads the next one from another GPU's memory, or writes there what has been multiplied.
Copies do not overlap with one another; the last tiles of a part do with the first of the next:

    gather = copy to where others read + barrier + part + (n - 1) * max(part, copy)
    scatter = part + (n - 1) * max(part, barrier + copy) + barrier + sum of n parts
    part = products / n + launch
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.fx import Node

from gt_passes._torch_internals import OpOverload, value_of
from gt_passes.analysis.node_calls import arguments_of
from gt_passes.analysis.symbol_sizes import SymbolSizes
from gt_passes.simulation.beside import DeviceParts
from gt_passes.simulation.compute_model import matmul_us
from gt_passes.simulation.hardware import Hardware
from gt_passes.simulation.operands import PricedOperand, operands_of, output_operands
from gt_passes.simulation.work import MatmulShape

_GATHERS = frozenset({"symm_mem::fused_all_gather_matmul"})
_SCATTERS = frozenset(
    {"symm_mem::fused_matmul_reduce_scatter", "symm_mem::fused_scaled_matmul_reduce_scatter"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinedProduct:
    """What one fused call does on a rank."""

    collective: Literal["all_gather", "reduce_scatter"]
    group_name: str
    shapes: tuple[MatmulShape, ...]
    """Of the whole products."""

    dtype: torch.dtype
    product_bytes: tuple[int, ...]
    """That each product reads and writes, its right operand once for each rank."""

    part_bytes: int
    """What goes from one rank to another."""

    @property
    def flops(self) -> int:
        """Of all products."""
        return sum(shape.flops for shape in self.shapes)


def is_pipelined_product(node: Node) -> bool:
    """Whether a node is such a call."""
    target = node.target
    return isinstance(target, OpOverload) and target._schema.name in _GATHERS | _SCATTERS


def pipelined_product(node: Node, num_ranks: int, sizes: SymbolSizes) -> PipelinedProduct:
    """What a node does for which ``is_pipelined_product`` holds.

    Args:
        node: of a captured graph, with recorded values.
        num_ranks: of its group.
        sizes: numbers for symbolic sizes.
    """
    assert isinstance(node.target, OpOverload)  # is_pipelined_product has looked
    gathers = node.target._schema.name in _GATHERS
    arguments = arguments_of(node)
    left = _operand(arguments["A"], sizes)
    rights = [_operand(each, sizes) for each in arguments["Bs"]] if gathers else []
    rights = rights or [_operand(arguments["B"], sizes)]
    inner = left.shape[-1]
    rows = left.numel // inner * (num_ranks if gathers else 1)
    shapes = tuple(MatmulShape(rows, right.shape[-1], inner) for right in rights)
    (result, *_) = output_operands(node, sizes)
    itemsize = result.dtype.itemsize
    return PipelinedProduct(
        collective="all_gather" if gathers else "reduce_scatter",
        group_name=str(arguments["group_name"]),
        shapes=shapes,
        dtype=left.dtype,
        product_bytes=tuple(
            rows * inner * left.dtype.itemsize
            + num_ranks * right.num_bytes
            + rows * right.shape[-1] * itemsize
            for right in rights
        ),
        part_bytes=left.num_bytes if gathers else result.num_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinedTime:
    """Microseconds."""

    total_us: float
    part_us: float
    """One part of all products."""

    copy_us: float
    """What one part takes from GPU to GPU."""

    needs: DeviceParts
    """For how long all products keep the device busy, without their launches."""

    @property
    def is_product(self) -> bool:
        """Whether parts take longer than the copies beside them."""
        return self.part_us >= self.copy_us


def pipelined_time(product: PipelinedProduct, num_ranks: int, hardware: Hardware) -> PipelinedTime:
    """How long the call takes, from the moment when all ranks are there.

    Args:
        product: what is done.
        num_ranks: of the group, all on one node.
        hardware: the machine.
    """
    memory_rate = hardware.hbm_bytes_per_s * hardware.hbm_streaming_efficiency
    launch_us = hardware.kernel_fixed_us
    products_us = [
        (matmul_us(shape, product.dtype, hardware), 1e6 * moved / memory_rate)
        for shape, moved in zip(product.shapes, product.product_bytes, strict=True)
    ]
    whole_us = sum(map(max, products_us))
    needs = DeviceParts(*map(sum, zip(*products_us, strict=True)))
    part_us = whole_us / num_ranks + launch_us * len(product.shapes)
    copy_us = launch_us + 1e6 * product.part_bytes / hardware.nvlink_bus_bytes_per_s
    barrier_us = launch_us + hardware.nccl_ring_nvlink_ll_us
    if product.collective == "all_gather":
        first_us = launch_us + 2e6 * product.part_bytes / memory_rate + barrier_us
        total_us = first_us + part_us + (num_ranks - 1) * max(part_us, copy_us)
    else:
        copy_us += barrier_us
        sum_us = launch_us + 1e6 * (num_ranks + 1) * product.part_bytes / memory_rate
        total_us = part_us + (num_ranks - 1) * max(part_us, copy_us) + barrier_us + sum_us
    return PipelinedTime(total_us=total_us, part_us=part_us, copy_us=copy_us, needs=needs)


def _operand(argument: object, sizes: SymbolSizes) -> PricedOperand:
    assert isinstance(argument, Node)  # tensors of a captured graph are nodes
    (operand,) = operands_of(value_of(argument), sizes)
    return operand
