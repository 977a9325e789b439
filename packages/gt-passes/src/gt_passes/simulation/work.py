"""What one operator has to do, whatever the machine: arithmetic and bytes of memory.

The formulas are the usual ones: twice the multiply-adds of a matrix product (as in
``torch.utils.flop_counter``), each distinct tensor read or written once. An operator without a
formula is memory-bound if it is one of PyTorch's own and not known to be otherwise; every other one
is priced by its bytes too, but says so (``OpWork.is_guess``), so that reports can list it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch.fx import Node

from gt_passes._torch_internals import HigherOrderOperator, OpOverload, value_of
from gt_passes.analysis.aliasing import written_nodes
from gt_passes.analysis.bucket_copies import BUCKET_COPIES
from gt_passes.analysis.collectives import is_collective, is_wait
from gt_passes.analysis.host_copies import WAIT_COPY, is_host_copy
from gt_passes.analysis.node_calls import arguments_of
from gt_passes.analysis.operator_aliases import only_makes_views
from gt_passes.analysis.symbol_sizes import SymbolSizes
from gt_passes.simulation.operands import (
    PricedOperand,
    input_operands,
    operands_of,
    output_operands,
)

OpKind = Literal[
    "none",  # no operator at all: getitem, symbolic sizes, inputs, outputs
    "view",  # the host's time only
    "wait",  # likewise: the compute stream waits for a collective
    "collective",
    "host_scalar",  # the host reads a number from the device
    "host_copy",  # between host and device memory
    "matmul",
    "grouped_matmul",
    "attention_forward",
    "attention_backward",
    "streaming",  # memory-bound, in order
    "irregular",  # memory-bound, gathers and scatters
]


class MatmulShape(NamedTuple):
    """``batch`` products of (m, k) by (k, n)."""

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def flops(self) -> int:
        """Twice the multiply-adds."""
        return 2 * self.m * self.n * self.k * self.batch


@dataclass(frozen=True, slots=True, kw_only=True)
class OpWork:
    """What one operator has to do."""

    kind: OpKind
    moved_bytes: int = 0
    """Read and written in device memory; across the bus for the kind ``host_copy``."""

    flops: int = 0
    """Counted for matrix products and attention; 0 where memory decides in any case."""

    matmul: MatmulShape | None = None
    dtype: torch.dtype | None = None
    """In which the arithmetic is done; None without flops."""

    is_guess: bool = False
    """Whether no formula was known, so that bytes stand for everything."""

    blocks_host: bool = False
    """Whether the host waits until it is done."""


WorkRule = Callable[[Node, SymbolSizes], OpWork]
"""Says what a node does. Its answer may depend on shapes and dtypes of arguments only."""

aten = torch.ops.aten

_NO_OPERATOR_NAMES = ("sym_size", "sym_numel", "sym_stride", "sym_storage_offset")
_ALLOCATES_ONLY = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "empty_permuted"})
_FILLS = frozenset(
    {
        *("zeros", "ones", "full", "arange", "scalar_tensor", "zeros_like", "ones_like"),
        *("full_like", "new_zeros", "new_ones", "new_full", "fill_", "zero_", "fill", "eye"),
        *("rand", "randn", "randint", "rand_like", "randn_like", "bernoulli_", "normal_"),
    }
)
_GATHERS = frozenset({"embedding", "index", "index_select", "gather", "take", "take_along_dim"})
_SCATTERS = frozenset(
    {
        *("index_put", "index_put_", "_unsafe_index_put", "scatter", "scatter_", "scatter_add"),
        *("scatter_add_", "index_add", "index_add_", "index_copy", "scatter_reduce"),
        *("embedding_dense_backward",),
    }
)
_REORDERS = frozenset(
    {"sort", "argsort", "topk", "unique", "_unique2", "nonzero", "histc", "bincount"}
)
# PyTorch's own operators whose cost is not that of their bytes and for which no formula is here.
_HEAVY_PREFIXES = ("linalg_", "_linalg", "cholesky", "_fft", "fft_", "lu_", "_cdist", "cdist")
_HEAVY_NAMES = frozenset(
    {"lstm", "gru", "_cudnn_rnn", "_thnn_fused_lstm_cell", "svd", "qr", "ormqr", "triangular_solve"}
)


def work_of(
    node: Node, sizes: SymbolSizes, rules: Mapping[object, WorkRule] | None = None
) -> OpWork:
    """What a node has to do.

    Args:
        node: of a captured graph, with recorded values.
        sizes: numbers for symbolic sizes.
        rules: further formulas, by the node's target; they come before those here.
    """
    target = node.target
    if node.op != "call_function":
        return OpWork(kind="none")
    if rules and target in rules:
        return rules[target](node, sizes)
    if is_wait(node) or target is WAIT_COPY:
        return OpWork(kind="wait")
    if is_host_copy(node):
        (copy,) = output_operands(node, sizes)
        return OpWork(kind="host_copy", moved_bytes=copy.num_bytes)
    if is_collective(node):
        return OpWork(kind="collective")
    if target in BUCKET_COPIES:
        return OpWork(kind="streaming", moved_bytes=_all_bytes(node, sizes))
    if isinstance(target, HigherOrderOperator):
        return _higher_order_work(node, sizes)
    if not isinstance(target, OpOverload):
        return OpWork(kind="none")  # getitem, arithmetic on sizes
    name = target._schema.name.partition("::")[2]
    if name.startswith(_NO_OPERATOR_NAMES):
        return OpWork(kind="none")
    if name == "_local_scalar_dense":
        return OpWork(kind="host_scalar", blocks_host=True)
    if only_makes_views(target) or name in _ALLOCATES_ONLY:
        return OpWork(kind="view")
    if target.namespace == "aten":
        if name in _MATMULS:
            return _MATMULS[name](node, sizes)
        if _is_attention(target):
            is_backward = name.endswith("_backward")  # whose gradient comes first
            return _attention_work(node, sizes, int(is_backward), is_backward=is_backward)
    copied = _host_copy_work(node, sizes)
    return copied or _memory_work(node, name, sizes, is_aten=target.namespace in ("aten", "prims"))


def is_view_node(node: Node) -> bool:
    """Whether a node only views its first argument, or takes an item out of it."""
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, OpOverload) and only_makes_views(node.target)


# Matrix products ------------------------------------------------------------------------------


def _product(node: Node, left: int, right: int, sizes: SymbolSizes) -> OpWork:
    a, b = _argument(node, left, sizes), _argument(node, right, sizes)
    *batch, m, k = (1, *a.shape) if len(a.shape) == 1 else a.shape
    n = 1 if len(b.shape) == 1 else b.shape[-1]
    return _matmul_work("matmul", MatmulShape(m, n, k, math.prod(batch)), a.dtype, node, sizes)


def _grouped_product(node: Node, sizes: SymbolSizes) -> OpWork:
    """``_grouped_mm``, ``_scaled_grouped_mm``: one product for each group of rows (or of K).

    (M, K) x (G, K, N), (G, M, K) x (K, N) split G ways, (M, K) x (K, N) with K split, or batched.
    Groups count as equally large.
    """
    a, b = _argument(node, 0, sizes), _argument(node, 1, sizes)
    (result,) = output_operands(node, sizes)
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if len(a.shape) == 2 and len(b.shape) == 3:
        groups = b.shape[0]
        shape = MatmulShape(max(1, m // groups), n, k, groups)
    elif len(a.shape) == 3 and len(b.shape) == 2:
        groups = a.shape[0]
        shape = MatmulShape(m, max(1, n // groups), k, groups)
    elif len(a.shape) == 2:
        groups = result.shape[0]
        shape = MatmulShape(m, n, max(1, k // groups), groups)
    else:
        shape = MatmulShape(m, n, k, a.shape[0])
    return _matmul_work("grouped_matmul", shape, a.dtype, node, sizes)


def _convolution(node: Node, sizes: SymbolSizes) -> OpWork:
    """As the matrix product that it is after unfolding; transposed ones have the same count."""
    x, weight = _argument(node, 0, sizes), _argument(node, 1, sizes)
    (result,) = output_operands(node, sizes)
    transposed = bool(node.args[6]) if len(node.args) > 6 else False
    over = x if transposed else result
    rows = over.numel // over.shape[1] if over.shape[1] else 0
    # Each output element takes the weights of one output channel.
    inner = weight.numel // weight.shape[0] if weight.shape[0] else 0
    shape = MatmulShape(rows, over.shape[1], inner)
    return _matmul_work("matmul", shape, x.dtype, node, sizes)


def _convolution_backward(node: Node, sizes: SymbolSizes) -> OpWork:
    gradient, weight = _argument(node, 0, sizes), _argument(node, 2, sizes)
    mask: Any = node.args[-1]
    wanted = sum(bool(flag) for flag in mask[:2])
    channels = gradient.shape[1]
    rows = gradient.numel // channels if channels else 0
    inner = weight.numel // weight.shape[0] if weight.shape[0] else 0
    shape = MatmulShape(rows, channels, inner, wanted)
    return _matmul_work("matmul", shape, gradient.dtype, node, sizes)


def _matmul_work(
    kind: Literal["matmul", "grouped_matmul"],
    shape: MatmulShape,
    dtype: torch.dtype,
    node: Node,
    sizes: SymbolSizes,
) -> OpWork:
    return OpWork(
        kind=kind,
        flops=shape.flops,
        matmul=shape,
        dtype=dtype,
        moved_bytes=_all_bytes(node, sizes),
    )


_MATMULS: Mapping[str, WorkRule] = {
    "mm": lambda node, sizes: _product(node, 0, 1, sizes),
    "bmm": lambda node, sizes: _product(node, 0, 1, sizes),
    "mv": lambda node, sizes: _product(node, 0, 1, sizes),
    "_scaled_mm": lambda node, sizes: _product(node, 0, 1, sizes),
    "addmm": lambda node, sizes: _product(node, 1, 2, sizes),
    "addmm_": lambda node, sizes: _product(node, 1, 2, sizes),
    "addmv": lambda node, sizes: _product(node, 1, 2, sizes),
    "baddbmm": lambda node, sizes: _product(node, 1, 2, sizes),
    "_grouped_mm": _grouped_product,
    "_scaled_grouped_mm": _grouped_product,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}


# Attention ------------------------------------------------------------------------------------

_ATTENTION_MARK = "scaled_dot_product"
_ATTENTION_PREFIXES = ("_flash_attention", "_efficient_attention", "_cudnn_attention")
_MASK_ARGUMENTS = ("attn_mask", "attn_bias", "bias")


@cache
def _is_attention(target: OpOverload) -> bool:
    name = target._schema.name.partition("::")[2]
    return _ATTENTION_MARK in name or name.startswith(_ATTENTION_PREFIXES)


def is_masked(node: Node) -> bool:
    """Whether an attention operator skips part of the query-key pairs: causal, or a mask given.

    FlexAttention always has a block mask, possibly one that keeps everything; it counts as masked.
    """
    if isinstance(node.target, HigherOrderOperator):
        return str(node.target).startswith("flex_attention")
    if not isinstance(node.target, OpOverload) or not _is_attention(node.target):
        return False
    arguments = arguments_of(node)
    masks = (arguments.get(name) for name in _MASK_ARGUMENTS)
    return bool(arguments.get("is_causal")) or any(mask is not None for mask in masks)


def _attention_work(
    node: Node, sizes: SymbolSizes, first: int, *, is_backward: bool, rounded: bool = False
) -> OpWork:
    """``flops`` count every query-key pair; the machine's mask density comes in with its time.

    Forward: scores and their product with the values. Backward: the scores again, and gradients of
    probabilities, values, queries and keys. Queries, keys and values stand from ``first`` on.
    """
    q, k, v = (_argument(node, first + index, sizes) for index in range(3))
    pairs = math.prod(q.shape[:-1]) * k.shape[-2]
    wide, narrow = q.shape[-1], v.shape[-1]
    if rounded:
        wide, narrow = _next_power_of_two(wide), _next_power_of_two(narrow)
    flops = 2 * pairs * (3 * wide + 2 * narrow if is_backward else wide + narrow)
    passes = 3 if is_backward else 1  # reads and gradients of the same size, the output twice
    moved = passes * (q.num_bytes + k.num_bytes + v.num_bytes + q.num_bytes * narrow // wide)
    return OpWork(
        kind="attention_backward" if is_backward else "attention_forward",
        flops=flops,
        dtype=q.dtype,
        moved_bytes=moved,
    )


def _next_power_of_two(width: int) -> int:
    return 1 << (width - 1).bit_length()


def _higher_order_work(node: Node, sizes: SymbolSizes) -> OpWork:
    name = str(node.target)
    if name in ("flex_attention", "flex_attention_backward"):
        # Its kernels pad head dimensions to powers of two (torch/_inductor/kernel/flex).
        return _attention_work(node, sizes, 0, is_backward=name.endswith("_backward"), rounded=True)
    return OpWork(kind="streaming", moved_bytes=_all_bytes(node, sizes), is_guess=True)


# Memory ---------------------------------------------------------------------------------------


def _memory_work(node: Node, name: str, sizes: SymbolSizes, *, is_aten: bool) -> OpWork:
    inputs, outputs = input_operands(node, sizes), output_operands(node, sizes)
    written = _num_bytes(outputs)
    if name in _FILLS:
        return OpWork(kind="streaming", moved_bytes=written)
    if name in _GATHERS:
        # Of the table only the rows that are asked for.
        return OpWork(kind="irregular", moved_bytes=2 * written + _num_bytes(inputs[1:]))
    if name in _SCATTERS:
        return OpWork(kind="irregular", moved_bytes=_scatter_bytes(node, inputs, outputs))
    if name == "copy_":
        return OpWork(kind="streaming", moved_bytes=written + _num_bytes(inputs[1:]))
    is_heavy = name in _HEAVY_NAMES or name.startswith(_HEAVY_PREFIXES)
    return OpWork(
        kind="irregular" if name in _REORDERS else "streaming",
        moved_bytes=_all_bytes(node, sizes),
        is_guess=is_heavy or not is_aten,
    )


def _scatter_bytes(
    node: Node, inputs: Sequence[PricedOperand], outputs: Sequence[PricedOperand]
) -> int:
    """What is added is read, the rows that it goes to are read and written.

    A fresh result is first filled from the old one.
    """
    mutates = next(iter(written_nodes(node)), None) is not None
    source = _num_bytes(inputs[1:])
    return 3 * source + (0 if mutates else _num_bytes(inputs[:1]) + _num_bytes(outputs))


def _host_copy_work(node: Node, sizes: SymbolSizes) -> OpWork | None:
    """A copy between the memories of host and device, or None."""
    outputs, inputs = output_operands(node, sizes), input_operands(node, sizes)
    if len(outputs) != 1 or not inputs:
        return None
    source = inputs[-1] if "copy_" in str(node.target) else inputs[0]
    devices = {source.device_type, outputs[0].device_type}
    if len(devices) == 1 or "cpu" not in devices or source.numel != outputs[0].numel:
        return None
    to_host = outputs[0].device_type == "cpu"
    return OpWork(
        kind="host_copy",
        moved_bytes=outputs[0].numel * outputs[0].dtype.itemsize,
        blocks_host=to_host and not node.kwargs.get("non_blocking", False),
    )


def _all_bytes(node: Node, sizes: SymbolSizes) -> int:
    """Every tensor that goes in and every one that comes out, once."""
    outputs = output_operands(node, sizes)
    moved = _num_bytes(input_operands(node, sizes)) + _num_bytes(outputs)
    if not outputs:  # in place over lists, such as _foreach_add_
        for written in written_nodes(node):
            moved += _num_bytes(tuple(operands_of(value_of(written), sizes)))
    return moved


def _num_bytes(operands: Sequence[PricedOperand]) -> int:
    return sum(operand.num_bytes for operand in operands)


def _argument(node: Node, position: int, sizes: SymbolSizes) -> PricedOperand:
    argument = node.args[position]
    assert isinstance(argument, Node)  # tensors of a captured graph are nodes
    (operand,) = operands_of(value_of(argument), sizes)
    return operand
