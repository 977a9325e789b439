"""The language in which most rules are written: dims that go together carry the same label.

As in an einsum, each dim of each tensor of a call carries a label or none. Sharding a label shards
every dim that carries it; tensors without it are replicated. An output without it is the sum of
what the ranks compute, where the operator sums over the label, and otherwise there is no such
option. ``mm`` is ``mk,kn->mn`` that sums over k, a softmax has no label on its dim, and a pointwise
operator has the labels of its output, aligned from the last dim, on every operand.

A dim without label is never sharded: that is how a rule says that an operator needs a dim whole.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from gt_autoparallel.graph.options import AxisOption

Labels = tuple[Hashable | None, ...]
"""One label, or None, for each dim of a tensor."""

REPLICATE = Replicate()
PARTIAL = Partial("sum")
_SHARDS = tuple(Shard(dim) for dim in range(16))


def shard(dim: int) -> Shard:
    """``Shard(dim)``; always the same object, which keeps comparisons cheap."""
    return _SHARDS[dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class DimLabels:
    """What a rule says of one call."""

    operands: tuple[Labels, ...]
    """Labels of the dims of each operand."""

    outputs: tuple[Labels | None, ...]
    """Labels of the dims of each output; None where it is no tensor."""

    summed: frozenset[Hashable] = frozenset()
    """Labels over which the operator sums: an output without one of them is then partial."""

    linear: tuple[frozenset[int], ...] = ()
    """Sets of operands in which, taken together, the operator is linear (and homogeneous), the
    others being replicated: they may all be partial, and every output is then partial. Only sets
    for which that saves communication are worth an option."""


def all_but(num_dims: int, whole: Collection[int]) -> Labels:
    """A label of its own for each dim but those of ``whole``."""
    return tuple(None if dim in whole else dim for dim in range(num_dims))


def axis_options(labels: DimLabels) -> Iterator[AxisOption]:
    """The options that labels say, replicated first, then by label, then the partial ones."""
    yield AxisOption(
        operands=(REPLICATE,) * len(labels.operands),
        outputs=tuple(None if output is None else REPLICATE for output in labels.outputs),
    )
    for label in _in_order((*labels.operands, *labels.outputs)):
        option = _sharded(labels, label)
        if option is not None:
            yield option
    for chosen in labels.linear:
        yield AxisOption(
            operands=tuple(
                PARTIAL if index in chosen else REPLICATE for index in range(len(labels.operands))
            ),
            outputs=tuple(None if output is None else PARTIAL for output in labels.outputs),
        )


def _in_order(tensors: Iterable[Labels | None]) -> list[Hashable]:
    labels = (label for tensor in tensors if tensor is not None for label in tensor)
    return list(dict.fromkeys(label for label in labels if label is not None))


def _sharded(labels: DimLabels, label: Hashable) -> AxisOption | None:
    outputs: list[Placement | None] = []
    for output in labels.outputs:
        if output is None:
            outputs.append(None)
        elif label in output:
            outputs.append(shard(output.index(label)))
        elif label in labels.summed:
            outputs.append(PARTIAL)
        else:
            return None
    operands = tuple(
        shard(operand.index(label)) if label in operand else REPLICATE
        for operand in labels.operands
    )
    return AxisOption(operands=operands, outputs=tuple(outputs))
