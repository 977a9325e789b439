"""Nothing is written that only a kernel would refuse, when the step runs.

Fake values take writes to an expanded tensor, of which several elements are one, and of ATen's
elementwise operators those whose result the written tensor cannot hold, as a fraction in whole
numbers. Of what else only kernels refuse (lists of tensors, as ``_foreach_mul_`` writes them,
``index_add_``, ``addmm_``) nothing is known here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, cast

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from gt_passes._torch_internals import OpOverload, value_of
from gt_passes.analysis.aliasing import written_nodes
from gt_passes.analysis.tensor_signature import describe, signature
from gt_passes.graph_problem import GraphProblem

_CHECK: Final = "refused writes"

_TAKE_IT = frozenset(
    {
        *("aten::fill_", "aten::zero_", "aten::masked_fill_", "aten::index_fill_"),
        *("aten::index_put_", "aten::_index_put_impl_", "aten::tril_", "aten::triu_"),
    }
)
"""Operators whose kernels write to an expanded tensor, by running them on a CPU."""


def find_refused_write_problems(writers: Iterable[Node]) -> Iterator[GraphProblem]:
    """Yield a problem for each write to an expanded tensor, or of what a tensor cannot hold.

    Args:
        writers: nodes that write to memory.
    """
    for writer in writers:
        yield from _dtype_problems(writer)
        if _takes_expanded(writer):
            continue
        for written in written_nodes(writer):
            value = value_of(written)
            if isinstance(value, torch.Tensor) and _is_expanded(value):
                yield GraphProblem(
                    check=_CHECK,
                    node_name=writer.name,
                    target=str(writer.target),
                    message=f"it writes to {written.name}, of which elements share memory",
                    expected="a tensor whose elements each have memory of their own",
                    got=describe(signature(value)),
                )


def _dtype_problems(writer: Node) -> Iterator[GraphProblem]:
    pure = _without_write(writer.target)
    if pure is None or any(value_of(each) is None for each in writer.all_input_nodes):
        return
    args, kwargs = cast("Any", map_aggregate((writer.args, writer.kwargs), _small))
    result: torch.dtype | None = None
    refusal = ""
    try:
        result = pure(*args, **kwargs).dtype
    except RuntimeError as error:
        refusal = str(error).splitlines()[0]
    except Exception:  # noqa: BLE001 - promotion fails on rare types: nothing is known of these
        return
    for written in written_nodes(writer):
        value = cast("torch.Tensor", value_of(written))  # or the operator refused it
        if result is not None and torch.can_cast(result, value.dtype):
            continue
        yield GraphProblem(
            check=_CHECK,
            node_name=writer.name,
            target=str(writer.target),
            message=f"its operator refuses to write to {written.name}: {refusal}"
            if result is None
            else f"it writes {result} to {written.name}, which cannot hold it",
            expected=None if result is None else f"a tensor to which {result} is converted",
            got=describe(signature(value)),
        )


@functools.cache
def _without_write(target: object) -> Callable[..., Any] | None:
    """The operator that gives what an elementwise one of ATen would write; None of any other.

    Those of others may carry the tag and say nothing of types: their fakes may look at sizes.
    """
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags:
        return None
    namespace, _, name = target._schema.name.partition("::")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if namespace != "aten" or packet is None or not name.endswith("_"):
        return None
    # Names of overloads differ: `pow_.Scalar` is `pow.Tensor_Scalar`.
    overloads: list[OpOverload] = [getattr(packet, each) for each in packet.overloads()]
    return next((each for each in overloads if _takes(each) == _takes(target)), None)


def _takes(operator: OpOverload) -> list[tuple[str, str]]:
    return [(each.name, str(each.type)) for each in operator._schema.arguments]


def _small(argument: Any) -> Any:
    """As many dimensions, of one element each: what decides the type of a result."""
    value = value_of(argument) if isinstance(argument, Node) else argument
    if isinstance(value, torch.Tensor):
        return torch.empty((1,) * value.dim(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return {torch.SymInt: 1, torch.SymFloat: 1.0, torch.SymBool: True}[type(value)]
    return value


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
