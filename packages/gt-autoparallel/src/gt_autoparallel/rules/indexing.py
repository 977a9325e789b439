"""Operators that read or write at computed places.

Dims that are not indexed behave as in a pointwise operator. The indices may be sharded where each
of them makes its own part of the result; where they say where to add, the parts are summands, and
what they are added to must be one of the summands too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence

import torch

from gt_autoparallel.graph.options import AxisOption
from gt_autoparallel.rules.dim_labels import PARTIAL, DimLabels, Labels, all_but, axis_options
from gt_autoparallel.rules.operator_call import CallOperand, OperatorCall
from gt_autoparallel.rules.operator_rule import Rules, labelled, rules_of
from gt_autoparallel.rules.pointwise import broadcast_labels, broadcast_shape, can_be_partial


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Indexed:
    """Labels of ``self[indices]``."""

    source: Labels
    indices: tuple[Labels, ...]
    result: Labels
    result_shape: tuple[int, ...]
    of_indices: frozenset[Hashable]


def _indexed(call: OperatorCall) -> _Indexed:
    """Dims of advanced indexing: together in place of the indexed dims, or first if apart."""
    source = call.operands[0].shape
    given: Sequence[CallOperand | None] = call.arguments["indices"]
    specs = {dim: call.operands[leaf.index] for dim, leaf in enumerate(given) if leaf is not None}
    if any(spec.dtype in (torch.bool, torch.uint8) for spec in specs.values()):
        # The result's size depends on the values of a mask.
        return _Indexed(
            source=(None,) * len(source),
            indices=tuple((None,) * len(spec.shape) for spec in specs.values()),
            result=(None,) * len(call.output().shape),
            result_shape=call.output().shape,
            of_indices=frozenset(),
        )
    dims = sorted(specs)
    shape = broadcast_shape(spec.shape for spec in specs.values())
    first = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    places: Labels = tuple(("index", dim) for dim in range(len(shape)))
    labels: Labels = tuple(None if dim in specs else ("source", dim) for dim in range(len(source)))
    kept = [dim for dim in range(len(source)) if dim not in specs]
    before = [dim for dim in kept if dim < first]
    after = kept[len(before) :]
    return _Indexed(
        source=labels,
        indices=tuple(
            tuple(
                None if place is None else places[place]
                for place in broadcast_labels(spec.shape, shape)
            )
            for spec in specs.values()
        ),
        result=(*(labels[d] for d in before), *places, *(labels[d] for d in after)),
        result_shape=(*(source[d] for d in before), *shape, *(source[d] for d in after)),
        of_indices=frozenset(places),
    )


def _index(call: OperatorCall) -> DimLabels:
    indexed = _indexed(call)
    return DimLabels(operands=(indexed.source, *indexed.indices), outputs=(indexed.result,))


def _index_put(call: OperatorCall) -> Iterator[AxisOption]:
    indexed = _indexed(call)
    values = tuple(
        None if place is None else indexed.result[place]
        for place in broadcast_labels(call.spec("values").shape, indexed.result_shape)
    )
    accumulates = bool(call.arguments["accumulate"])
    labels = DimLabels(
        operands=(indexed.source, *indexed.indices, values),
        outputs=(indexed.source,),
        summed=indexed.of_indices if accumulates else frozenset(),
    )
    return _added_to_partial(labels, call)


def _gather(call: OperatorCall) -> DimLabels:
    dim, labels = call.dim(), _equal_dims(call, ("self", "index"))
    return DimLabels(operands=(labels, _with(labels, dim)), outputs=(_with(labels, dim),))


def _scatter(call: OperatorCall) -> DimLabels:
    names = [name for name in ("self", "index", "src") if call.index(name) is not None]
    labels = _equal_dims(call, names)
    return DimLabels(operands=(labels,) * len(names), outputs=(labels,))


def _scatter_add(call: OperatorCall) -> Iterator[AxisOption]:
    dim, labels = call.dim(), _equal_dims(call, ("self", "index", "src"))
    same = call.spec("index").shape == call.spec("src").shape
    places = _with(labels, dim) if same else labels
    return _added_to_partial(
        DimLabels(operands=(labels, places, places), outputs=(labels,), summed=frozenset({dim})),
        call,
    )


def _index_select(call: OperatorCall) -> DimLabels:
    dim = call.dim()
    labels = all_but(len(call.operands[0].shape), {dim})
    index = (dim,) * len(call.spec("index").shape)
    return DimLabels(operands=(labels, index), outputs=(_with(labels, dim) if index else labels,))


def _index_add(call: OperatorCall) -> Iterator[AxisOption]:
    dim = call.dim()
    labels = all_but(len(call.operands[0].shape), {dim})
    index = (dim,) * len(call.spec("index").shape)
    return _added_to_partial(
        DimLabels(
            operands=(labels, index, _with(labels, dim) if index else labels),
            outputs=(labels,),
            summed=frozenset({dim}),
        ),
        call,
    )


def _added_to_partial(labels: DimLabels, call: OperatorCall) -> Iterator[AxisOption]:
    """Where the result is a sum over ranks, what is added to must be one as well."""
    for option in axis_options(labels):
        if option.outputs[0] != PARTIAL:
            yield option
        elif can_be_partial(call.output()):
            yield dataclasses.replace(option, operands=(PARTIAL, *option.operands[1:]))


def _equal_dims(call: OperatorCall, names: Sequence[str]) -> Labels:
    """Every dim but ``dim`` in which all of the tensors have the same size."""
    whole = call.dim()
    shapes = [call.spec(name).shape for name in names]
    return tuple(
        None if dim == whole or len({shape[dim] for shape in shapes}) > 1 else dim
        for dim in range(len(shapes[0]))
    )


def _with(labels: Labels, dim: int) -> Labels:
    return (*labels[:dim], dim, *labels[dim + 1 :])


RULES: Rules = {
    **rules_of(("_unsafe_index", "index"), labelled(_index)),
    **rules_of(("_unsafe_index_put", "index_put"), _index_put),
    **rules_of(("gather",), labelled(_gather)),
    **rules_of(("scatter",), labelled(_scatter)),
    **rules_of(("scatter_add",), _scatter_add),
    **rules_of(("index_select",), labelled(_index_select)),
    **rules_of(("index_add",), _index_add),
}
