"""FlexAttention: samples and heads, as far as its functions allow; rows of queries are not cut.

Samples and heads do not see each other, but scores and masks are functions of their *numbers*,
which on a shard start from zero (``index_reads``). Tensors that such a function looks up by the
number are cut along with it: the documents of packed samples, a learned bias of each head. The
tensors of a block mask are cut where they have samples or heads of their own, and are replicated
where one row serves all. The gradient of a tensor that is not cut is a sum over ranks.

With fewer key-value heads than heads both are cut into the same number of pieces. Where there are
more pieces than key-value heads, each rank has all key-value heads that its axis leaves, takes the
one that its heads share, and adds its gradient to those of the others. Rows of queries could be cut
only by renumbering, at every step and on every rank, the blocks that the mask lists for each block
of keys; a rule for them is not offered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from gt_autoparallel._torch_internals import HigherOrderOperator, operator_name
from gt_autoparallel.graph.function_graph import FunctionGraph, FunctionStep
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.options import AxisOption, NodeOption
from gt_autoparallel.graph.placement_graph import PlacementGraph, Value
from gt_autoparallel.rules.dim_labels import DimLabels, Labels, axis_options, shard
from gt_autoparallel.rules.operator_call import CallOperand, OperatorCall, operator_call
from gt_autoparallel.rules.operator_rule import OperatorRule, Rules
from gt_autoparallel.rules.sharded_call import LocalCall, ShardedCall

_BATCH, _HEADS = "batch", "heads"
_NUMBERED = (_BATCH, _HEADS)
"""In the order of dims, and of the numbers that functions are given."""

_PLURAL = {_BATCH: "samples", _HEADS: "heads"}

_KEYS = ("key", "value")
_LIKE_QUERIES = ("query", "out", "logsumexp", "grad_out", "grad_logsumexp")
_HEAD_DIM = 1

_Cuts = tuple[bool, ...]
"""For each mesh axis, whether it cuts heads."""


def _flex_attention(call: OperatorCall) -> Iterator[AxisOption]:
    by_operand = _LabelsOfOperands(call)
    allowed = [label for label in _NUMBERED if by_operand.add(label)]
    yield from axis_options(by_operand.labels(allowed))
    if _HEADS in allowed and _heads_per_key(call) > 1:
        yield from axis_options(by_operand.labels([_HEADS], cut_keys=False))


def uncut_attention(graph: PlacementGraph) -> list[str]:
    """A line for each way in which some FlexAttention of a graph cannot be cut.

    That costs time, and nothing else says why.
    """
    uncut: dict[str, list[str]] = {}
    for node in graph.of_kind("operator"):
        is_operator = isinstance(node.target, HigherOrderOperator)
        if is_operator and operator_name(node.target) in RULES:
            labels = _LabelsOfOperands(operator_call(node, graph.operand_specs(node)))
            for label in _NUMBERED:
                if not labels.add(label):
                    uncut.setdefault(label, []).append(node.name)
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: cannot be cut along "
        f"{_PLURAL[label]}, for its scores or mask do more with their numbers than to look them up "
        "in tensors that are cut likewise"
        for label, names in uncut.items()
    ]


class _LabelsOfOperands:
    """Labels of the dims of a call's operands and outputs."""

    def __init__(self, call: OperatorCall) -> None:
        self._call = call
        batch, heads, *_ = call.spec("query").shape
        self._sizes = {_BATCH: batch, _HEADS: heads}
        self._of_captured: dict[str, dict[int, int]] = {}
        """Of each label, which operands that functions read are cut along which dim."""

    def add(self, label: str) -> bool:
        """Find what is cut along with ``label``; False if it cannot be cut."""
        dims: dict[int, set[int | None]] = {}
        for function, num_values, captured in _functions(self._call):
            given = {
                function.num_inputs - len(captured) + place: operand.index
                for place, operand in enumerate(captured)
                if isinstance(operand, CallOperand)
            }
            found = reads(function, num_values + _NUMBERED.index(label), tuple(given))
            if found is None:
                return False
            for each in found:
                dims.setdefault(given[each.input], set()).add(each.dim)
        cut: dict[int, int] = {}
        for operand, of_operand in dims.items():
            if len(of_operand) > 1:
                return False  # one function reads its own part of it, the other one all
            (dim,) = of_operand
            if dim is not None and self._call.operands[operand].shape[dim] != self._sizes[label]:
                return False
            if dim is not None:
                cut[operand] = dim
        if not all(self._is_cut_or_shared(index, label) for index in _mask_tensors(self._call)):
            return False
        self._of_captured[label] = cut
        return True

    def labels(self, allowed: list[str], *, cut_keys: bool = True) -> DimLabels:
        call = self._call
        operands = [self._operand(index, allowed) for index in range(len(call.operands))]
        queries: Labels = tuple(label if label in allowed else None for label in _NUMBERED)
        for name in _LIKE_QUERIES:
            index = call.index(name)
            if index is not None:
                operands[index] = _padded(queries, len(call.operands[index].shape))
        keys: dict[str, Labels] = {}
        for name in _KEYS:
            batch = queries[0] if call.spec(name).shape[0] == self._sizes[_BATCH] else None
            keys[name] = (batch, queries[1] if cut_keys else None, None, None)
            index = call.index(name)
            assert index is not None
            operands[index] = keys[name]
        outputs: list[Labels | None]
        if "out" in call.arguments:
            of_captured = [
                operands[each.index] if isinstance(each, CallOperand) else None
                for each in call.arguments["score_mod_other_buffers"]
            ]
            outputs = [_padded(queries, 4), keys["key"], keys["value"], *of_captured]
        else:
            outputs = [_padded(queries, len(spec.shape)) for spec in call.outputs if spec]
        return DimLabels(
            operands=tuple(operands),
            outputs=tuple(
                None if spec is None else labels
                for spec, labels in zip(call.outputs, outputs, strict=True)
            ),
            summed=frozenset(allowed) if "out" in call.arguments else frozenset(),
        )

    def _operand(self, index: int, allowed: list[str]) -> Labels:
        """Of a tensor of the mask, or one that a function reads."""
        shape = self._call.operands[index].shape
        labels: list[str | None] = [None] * len(shape)
        if index in _mask_tensors(self._call):
            for dim, label in enumerate(_NUMBERED):
                if label in allowed and shape[dim] == self._sizes[label]:
                    labels[dim] = label
        for label in allowed:
            dim = self._of_captured[label].get(index, -1)
            if dim >= 0:
                labels[dim] = label
        return tuple(labels)

    def _is_cut_or_shared(self, index: int, label: str) -> bool:
        """Whether a tensor of the mask has a row for each sample or head, or one for all."""
        shape, dim = self._call.operands[index].shape, _NUMBERED.index(label)
        return len(shape) > len(_NUMBERED) and shape[dim] in (1, self._sizes[label])


def _functions(call: OperatorCall) -> Iterator[tuple[FunctionGraph, int, tuple[Any, ...]]]:
    """Each function, how many values stand before its numbers, and what it reads besides."""
    scores = tuple(call.arguments["score_mod_other_buffers"])
    for name in ("score_mod", "fw_graph", "joint_graph"):
        if name in call.arguments:
            yield call.arguments[name], 1, scores
    yield call.arguments["block_mask"][-1], 0, tuple(call.arguments["mask_mod_other_buffers"])


def _mask_tensors(call: OperatorCall) -> tuple[int, ...]:
    return call.indices("block_mask")


def _heads_per_key(call: OperatorCall) -> int:
    """Heads that share one key-value head."""
    return call.spec("query").shape[_HEAD_DIM] // call.spec("key").shape[_HEAD_DIM]


def _padded(labels: Labels, num_dims: int) -> Labels:
    return (*labels, *[None] * (num_dims - len(labels)))


# ---- axes that are not independent: heads of queries and of keys ------------------------------


def _fits(call: OperatorCall, option: NodeOption, mesh: MeshShape) -> bool:
    """Whether every rank has the key-value heads of its heads, and could not have fewer."""
    queries, keys = _head_cuts(call, option)
    if queries == keys:
        return True
    num_heads, num_keys = (call.spec(name).shape[_HEAD_DIM] for name in ("query", "key"))
    pieces = _num_pieces(queries, mesh)
    if num_keys % pieces == 0:
        return False  # keys can be cut as queries are: no rank needs more
    if (num_heads // num_keys) % (num_heads // pieces) != 0:
        return False  # some rank has heads of two groups, or parts of them
    return all(
        0 <= start < num_keys // _num_pieces(keys, mesh)
        for start in _starts(queries, keys, mesh, num_keys)
    )


def _starts(queries: _Cuts, keys: _Cuts, mesh: MeshShape, num_keys: int) -> Iterator[int]:
    """For each rank, where the key-value head that it needs is among those that it has."""
    coordinates: list[tuple[int, ...]] = [()]
    for is_cut, size in zip(queries, mesh.sizes, strict=True):
        places = range(size if is_cut else 1)
        coordinates = [(*rest, place) for rest in coordinates for place in places]
    for coordinate in coordinates:
        yield _start(queries, keys, mesh, num_keys, coordinate)


def _start(
    queries: _Cuts, keys: _Cuts, mesh: MeshShape, num_keys: int, coordinate: tuple[int, ...]
) -> int:
    needed = _place(queries, mesh, coordinate) * num_keys // _num_pieces(queries, mesh)
    return needed - _place(keys, mesh, coordinate) * num_keys // _num_pieces(keys, mesh)


def _place(cuts: _Cuts, mesh: MeshShape, coordinate: tuple[int, ...]) -> int:
    place = 0
    for is_cut, size, index in zip(cuts, mesh.sizes, coordinate, strict=True):
        place = place * size + index if is_cut else place
    return place


def _num_pieces(cuts: _Cuts, mesh: MeshShape) -> int:
    return math.prod(size for is_cut, size in zip(cuts, mesh.sizes, strict=True) if is_cut)


def _head_cuts(call: OperatorCall, option: NodeOption) -> tuple[_Cuts, _Cuts]:
    """Which axes cut the heads of queries, and which those of keys."""
    found: list[_Cuts] = []
    for name in ("query", "key"):
        index = call.index(name)
        assert index is not None
        found.append(tuple(placement == shard(_HEAD_DIM) for placement in option.operands[index]))
    queries, keys = found
    return queries, keys


# ---- what a rank runs -------------------------------------------------------------------------


def _localize(sharded: ShardedCall) -> LocalCall:
    call = sharded.call
    changed: dict[str, Any] = {}
    joint = call.arguments.get("joint_graph")
    if joint is not None:
        changed["joint_graph"] = _with_local_scatters(joint, sharded)
    queries, keys = _head_cuts(call, sharded.option)
    if queries == keys:
        return sharded.with_arguments(**changed)
    num_keys = call.spec("key").shape[_HEAD_DIM]
    start = _start(queries, keys, sharded.mesh, num_keys, sharded.coordinate)
    function = _with_one_key_backward if joint is not None else _with_one_key
    return sharded.with_arguments(partial(function, call.target, start), **changed)


def _with_one_key(
    operator: Any, start: int, query: Any, key: Any, value: Any, *others: Any
) -> tuple[Any, ...]:
    """The forward with one of the key-value heads that are there."""
    key, value = (torch.narrow(each, _HEAD_DIM, start, 1) for each in (key, value))
    result: tuple[Any, ...] = operator(query, key, value, *others)
    return result


def _with_one_key_backward(
    operator: Any, start: int, query: Any, key: Any, value: Any, *others: Any
) -> tuple[Any, ...]:
    """The backward, with gradients of the other key-value heads that are zero."""
    narrow = [torch.narrow(each, _HEAD_DIM, start, 1) for each in (key, value)]
    of_query, *of_narrow, of_captured = operator(query, *narrow, *others)
    of_keys = [
        torch.slice_scatter(torch.zeros_like(whole), part, _HEAD_DIM, start, start + 1)
        for whole, part in zip((key, value), of_narrow, strict=True)
    ]
    return of_query, *of_keys, of_captured


def _with_local_scatters(function: FunctionGraph, sharded: ShardedCall) -> FunctionGraph:
    """Scores with gradients: those of tensors that are cut have the shapes of this rank's parts.

    *Before*: ``zeros_and_scatter([heads], [h], gradient)``.
    *After*: ``zeros_and_scatter([heads on this rank], [h], gradient)``.
    """
    query = sharded.call.index("query")
    assert query is not None
    numbers = {1 + dim: sharded.operand_shard(query, dim)[1] for dim in range(len(_NUMBERED))}

    def localized(step: FunctionStep) -> FunctionStep:
        if not is_scatter(step):
            return step
        shape = list(step.args[0])
        for number, dim in scatter_dims(step, tuple(numbers)):
            shape[dim] //= numbers[number]
        return replace(step, args=(shape, *step.args[1:]))

    return replace(function, steps=tuple(map(localized, function.steps)))


_RULE = OperatorRule(options=_flex_attention, localize=_localize, fits=_fits)

RULES: Rules = {
    "higher_order.flex_attention": _RULE,
    "higher_order.flex_attention_backward": _RULE,
}


# What a function of FlexAttention does with the number of a sample or of a head.
#
# On a shard, samples and heads are numbered from zero. That is right for a function that uses
# the number to look something up in a tensor of which the rank has the same part, and wrong for
# every other use: a slope that is computed from the head's number would be another head's. So
# every step of the function that reads the number is looked at, and what is not known to be
# right forbids to cut.
_aten = torch.ops.aten
_LOOK_UP = _aten.index.Tensor
_SHAPED_LIKE_AN_INDEX = frozenset(
    {
        _aten.new_ones.default,
        _aten.new_zeros.default,
        _aten.new_full.default,
        _aten.new_empty.default,
        _aten.ones_like.default,
        _aten.zeros_like.default,
        _aten.full_like.default,
    }
)
"""Constants for which an operand gives a shape and a device, and nothing of its value."""

_SCATTER = "flex_lib::zeros_and_scatter"
"""Gradient of a look-up: (shape, indices, gradients) -> zeros of the shape, with these added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTensor:
    """How a function reads a tensor that it is given: at the number, along one of its dims."""

    input: int
    dim: int | None
    """None where none of its dims is looked up by the number."""


def reads(
    function: FunctionGraph, number: int, tensors: Sequence[int]
) -> tuple[ReadTensor, ...] | None:
    """How a function reads its tensors by a number, each of them that it reads at all.

    Args:
        function: scores, a mask, or scores with their gradients.
        number: which of its inputs is the number.
        tensors: which of its inputs are tensors of the caller's.

    Returns:
        None if a shard with numbers of its own would compute something else.
    """
    found: dict[int, set[int | None]] = {}
    for step in function.steps:
        for tensor in tensors:
            if tensor in step.operands() and step.target not in _SHAPED_LIKE_AN_INDEX:
                found.setdefault(tensor, set()).add(_looked_up_dim(step, tensor, number))
    if any(result == number for result in function.results()):
        return None
    for _, step in function.read_by(number):
        if step.target in _SHAPED_LIKE_AN_INDEX or _scatters_at(step, number):
            continue
        if all(_looked_up_dim(step, tensor, number) is None for tensor in tensors):
            return None
    if any(len(dims) != 1 for dims in found.values()):
        return None
    # What a function gives back as it is, it reads whole.
    whole = [tensor for tensor in tensors if tensor in function.results()]
    if any(found.get(tensor, {None}) != {None} for tensor in whole):
        return None
    return tuple(ReadTensor(input=tensor, dim=dim) for tensor, (dim,) in found.items())


def scatter_dims(step: FunctionStep, numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The dims of what a scatter makes that some numbers index: (number, dim)."""
    indices = step.args[1]
    for dim, index in enumerate(indices):
        if isinstance(index, Value) and index.node in numbers:
            yield index.node, dim


def is_scatter(step: FunctionStep) -> bool:
    """Whether a step is the gradient of a look-up."""
    return step.target is not None and step.target._schema.name == _SCATTER


def _scatters_at(step: FunctionStep, number: int) -> bool:
    """Whether a step is the gradient of a look-up by the number, and reads it for nothing else."""
    return is_scatter(step) and len(list(scatter_dims(step, (number,)))) == _uses(step, number) == 1


def _uses(step: FunctionStep, value: int) -> int:
    return step.operands().count(value)


def _looked_up_dim(step: FunctionStep, tensor: int, number: int) -> int | None:
    """The dim along which a step looks up the number in a tensor; None if it does not do so."""
    if step.target is not _LOOK_UP or step.args[0] != Value(tensor) or _uses(step, tensor) > 1:
        return None
    dims = [dim for dim, index in enumerate(step.args[1]) if index == Value(number)]
    return dims[0] if len(dims) == 1 else None
