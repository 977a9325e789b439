"""What prices depend on: the shapes, dtypes and memory of the tensors that an operator touches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.fx import Node

from gt_passes._torch_internals import value_of
from gt_passes.analysis.symbol_sizes import SymbolSizes


class PricedOperand(NamedTuple):
    """One tensor, with numbers for all sizes."""

    shape: tuple[int, ...]
    num_distinct: int
    """Elements of memory behind it: a broadcast dimension (stride 0) counts once."""

    dtype: torch.dtype
    device_type: str

    @property
    def numel(self) -> int:
        """Elements, broadcast ones as often as they appear."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory behind it."""
        return self.num_distinct * self.dtype.itemsize


class OperandReader:
    """Reads the operands of many nodes of one graph, each recorded value once.

    The graph must not change meanwhile.
    """

    def __init__(self, sizes: SymbolSizes) -> None:
        self._sizes = sizes
        self._read: dict[Node, tuple[PricedOperand, ...]] = {}

    def inputs(self, node: Node) -> tuple[PricedOperand, ...]:
        """As ``input_operands``."""
        return tuple(
            operand for argument in node.all_input_nodes for operand in self.outputs(argument)
        )

    def outputs(self, node: Node) -> tuple[PricedOperand, ...]:
        """As ``output_operands``."""
        read = self._read.get(node)
        if read is None:
            read = self._read[node] = output_operands(node, self._sizes)
        return read


def input_operands(node: Node, sizes: SymbolSizes) -> tuple[PricedOperand, ...]:
    """The distinct tensors among a node's arguments, in order."""
    return tuple(
        operand
        for argument in node.all_input_nodes
        for operand in operands_of(value_of(argument), sizes)
    )


def output_operands(node: Node, sizes: SymbolSizes) -> tuple[PricedOperand, ...]:
    """The tensors that a node returns, in order."""
    return tuple(operands_of(value_of(node), sizes))


def operands_of(value: object, sizes: SymbolSizes) -> Iterator[PricedOperand]:
    """The tensors in a recorded value: a tensor, or a tree of them."""
    if isinstance(value, torch.Tensor):
        yield _operand(value, sizes)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from operands_of(item, sizes)


def _operand(tensor: torch.Tensor, sizes: SymbolSizes) -> PricedOperand:
    shape = tuple(map(sizes.number, tensor.shape))
    distinct = math.prod(shape)
    if tensor.layout is torch.strided:
        for size, stride in zip(shape, tensor.stride(), strict=True):
            # A symbolic stride is a product of sizes, hence not 0; comparing it would add a guard.
            if type(stride) is int and stride == 0 and size > 1:
                distinct //= size
    return PricedOperand(shape, distinct, tensor.dtype, tensor.device.type)
