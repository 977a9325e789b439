"""How a captured graph uses the memory of its inputs, which limits what a call may pass for them.

A tensor with other strides than the captured one can be copied to those strides if the graph only
reads its elements. It cannot if the graph writes it, returns a view of it, or reads its memory at
fixed positions: the caller, or the graph, would see the difference.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from torch.fx import Graph, Node

from gt_trace._torch_internals import HigherOrderOperator, OpOverload, storage_key

InputUse = Literal["written", "returned", "positions", "offset", "strides", "contiguity"]
"""written: an operator may write the input. returned: an output may be a view of it. positions: an
operator reads its memory at positions fixed by the capture, not by the input's own strides.
offset, strides, contiguity: Python reads these, and may decide by them."""

_ORDER: tuple[InputUse, ...] = get_args(InputUse)
_STRIDED = frozenset({torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_.default})
_READING = ("flex_attention", "flex_attention_backward")


def input_uses(graph: Graph, further: Sequence[Collection[InputUse]]) -> list[tuple[InputUse, ...]]:
    """Return how a graph uses the memory of each placeholder, by position, and ``further`` uses.

    Views are found by operators' schemas, and by the storages of the fake values. Calls without a
    schema count as writes, except those of FlexAttention.
    """
    placeholders = graph.find_nodes(op="placeholder")
    uses = {node: set(known) for node, known in zip(placeholders, further, strict=True)}
    # Nodes that may be views, each with the placeholders that it may be a view of.
    views: dict[Node, frozenset[Node]] = {node: frozenset({node}) for node in placeholders}
    owners: dict[int, frozenset[Node]] = {}
    for node in placeholders:
        for key in _storages(node):
            owners[key] = owners.get(key, frozenset()) | {node}
    for node in graph.nodes:
        inputs = [each for each in node.all_input_nodes if each in views]
        if not inputs:
            continue
        if node.op == "output":
            for each in inputs:
                for owner in views[each]:
                    uses[owner].add("returned")
            continue
        found: frozenset[Node] = frozenset()
        for key in _storages(node):
            found |= owners.get(key, frozenset())
        for argument, is_written in _viewed_operands(node):
            of = views.get(argument, frozenset())
            found |= of
            for owner in of:
                if is_written:
                    uses[owner].add("written")
                if node.target in _STRIDED and _reads_positions(node, owner):
                    uses[owner].add("positions")
        if found:
            views[node] = found
    return [tuple(use for use in _ORDER if use in uses[node]) for node in placeholders]


def _viewed_operands(node: Node) -> Iterator[tuple[Node, bool]]:
    """Nodes that a node may be a view of, or may write, and whether it may write each."""
    target = node.target
    if not isinstance(target, OpOverload):
        is_reading = isinstance(target, HigherOrderOperator) and target.__name__ in _READING
        if not is_reading:
            for each in node.all_input_nodes:
                yield each, target is not operator.getitem
        return
    aliases = _aliases(target)
    if not aliases:
        return
    for name, value in (*enumerate(node.args), *node.kwargs.items()):
        if name in aliases:
            for operand in value if isinstance(value, Sequence) else (value,):
                if isinstance(operand, Node):
                    yield operand, aliases[name]


@functools.cache
def _aliases(target: OpOverload) -> dict[int | str, bool]:
    """Arguments that an operator writes or views, by position and name, and whether it writes."""
    return {
        key: declared.alias_info.is_write
        for position, declared in enumerate(target._schema.arguments)
        if declared.alias_info is not None
        for key in (position, declared.name)
    }


def _storages(node: Node) -> set[int]:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    return {
        storage_key(each)
        for each in values
        if isinstance(each, torch.Tensor) and each.layout is torch.strided
    }


def _reads_positions(node: Node, owner: Node) -> bool:
    """Return whether ``as_strided`` depends on where its input's elements lie in memory.

    It does not if it starts at the input's own first element, stays within its elements, and these
    have no gaps: a copy then has the same elements at the same distances.
    """
    size, stride = node.args[1], node.args[2]
    offset = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    example = owner.meta.get("val")
    if offset is not None or not isinstance(example, torch.Tensor):
        return True
    if node.args[0] is not owner:  # starts where another view starts
        view = node.args[0].meta.get("val") if isinstance(node.args[0], Node) else None
        if not isinstance(view, torch.Tensor):
            return True
        first: Any = view.storage_offset() - example.storage_offset()
    else:
        first = 0
    values = [first, *size, *stride, *example.shape, *example.stride()]  # type: ignore[misc]
    if not all(isinstance(each, int) for each in values):
        return True
    last = first + sum((n - 1) * s for n, s in zip(size, stride, strict=True))  # type: ignore[arg-type]
    extent = 1 + sum((n - 1) * s for n, s in zip(example.shape, example.stride(), strict=True))
    return extent != example.numel() or first < 0 or last >= extent
