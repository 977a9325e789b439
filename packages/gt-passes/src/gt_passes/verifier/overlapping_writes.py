"""Nothing is written to an expanded tensor, of which several elements are one.

Fake values take such a write, and most kernels of PyTorch refuse it when the step runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.fx import Node

from gt_passes._torch_internals import OpOverload, value_of
from gt_passes.analysis.aliasing import written_nodes
from gt_passes.analysis.tensor_signature import describe, signature
from gt_passes.graph_problem import GraphProblem

_TAKE_IT = frozenset(
    {
        *("aten::fill_", "aten::zero_", "aten::masked_fill_", "aten::index_fill_"),
        *("aten::index_put_", "aten::_index_put_impl_", "aten::tril_", "aten::triu_"),
    }
)
"""Operators whose kernels write to an expanded tensor, by running them on a CPU."""


def find_overlapping_write_problems(writers: Iterable[Node]) -> Iterator[GraphProblem]:
    """Yield a problem for each tensor that is written to and was expanded along a dimension.

    Args:
        writers: nodes that write to memory.
    """
    for writer in writers:
        if _takes_expanded(writer):
            continue
        for written in written_nodes(writer):
            value = value_of(written)
            if isinstance(value, torch.Tensor) and _is_expanded(value):
                yield GraphProblem(
                    check="memory order",
                    node_name=writer.name,
                    target=str(writer.target),
                    message=f"it writes to {written.name}, of which elements share memory",
                    expected="a tensor whose elements each have memory of their own",
                    got=describe(signature(value)),
                )


def _takes_expanded(writer: Node) -> bool:
    if not isinstance(writer.target, OpOverload):
        return False
    changes_metadata_alone = torch.Tag.inplace_view in writer.target.tags
    return changes_metadata_alone or writer.target._schema.name in _TAKE_IT


def _is_expanded(value: torch.Tensor) -> bool:
    """Whether a dimension of more than one has stride 0. Of symbols nothing is known."""
    if value.layout is not torch.strided:
        return False
    return any(
        type(size) is int and type(stride) is int and size > 1 and stride == 0
        for size, stride in zip(value.shape, value.stride(), strict=True)
    )
