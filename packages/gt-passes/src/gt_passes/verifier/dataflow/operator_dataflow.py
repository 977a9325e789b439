"""What operators do to values: which ones only move elements, and how.

A rule is exact: it says which elements of which values the result consists of. Where a rule does
not apply, it returns None, and the result is a new value known by its operator and arguments. So an
operator without a rule costs precision (a pass that rewrites it is doubted), never soundness.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from gt_passes._torch_internals import OpOverload, value_of
from gt_passes.analysis.graph_constants import frozen_literal
from gt_passes.analysis.node_calls import arguments_of
from gt_passes.verifier.dataflow import collective_dataflow, layout_dataflow
from gt_passes.verifier.dataflow.value_table import (
    Arguments,
    OtherValue,
    Rule,
    TensorValue,
    TupleValue,
    Value,
    ValueTable,
)

_aten = torch.ops.aten


def apply_rule(
    table: ValueTable,
    node: Node,
    load: Callable[[Node], Value],
    group_of: Callable[[str], str],
) -> Value | None:
    """The value of a call by the rule of its operator; None where there is none that applies.

    Args:
        table: knows all values.
        node: a call of a function.
        load: the value of an argument.
        group_of: the name under which a process group is known.
    """
    target = node.target
    if not isinstance(target, OpOverload):
        return _item(node, load)
    rule = _rule_of(target)
    if rule is None:
        return None

    def loaded(leaf: Any) -> Any:
        return load(leaf) if isinstance(leaf, Node) else leaf

    arguments = list(map_aggregate(list(arguments_of(node).values()), loaded))
    if rule in _COLLECTIVE_RULES:
        arguments = [group_of(item) if isinstance(item, str) else item for item in arguments]
    return rule(table, arguments, value_of(node))


def _item(node: Node, load: Callable[[Node], Value]) -> Value | None:
    """``operator.getitem`` of a tuple."""
    if getattr(node.target, "__name__", "") != "getitem" or len(node.args) != 2:
        return None
    source, index = node.args
    if not isinstance(source, Node) or not isinstance(index, int):
        return None
    value = load(source)
    return value.items[index] if isinstance(value, TupleValue) else None


def _same(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """The same tensor by another name, or waited for."""
    source = arguments[0]
    return source if isinstance(source, (TensorValue, OtherValue)) else None


def _copy(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """The same elements in other memory, perhaps of another device."""
    source = arguments[0]
    if isinstance(source, OtherValue):
        return table.symbolic_copy(source, recorded)
    return source if isinstance(source, TensorValue) else None


def _cast(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """A copy in another dtype, or in the same."""
    source = arguments[0]
    if isinstance(source, OtherValue):
        return table.symbolic_copy(source, recorded)
    return _in_dtype(table, source, recorded.dtype) if isinstance(source, TensorValue) else None


def _in_dtype(table: ValueTable, source: TensorValue, dtype: torch.dtype) -> TensorValue:
    def cast_atom(atom: int) -> int:
        definition = ("cast", dtype, atom)
        return table.atom(definition, numel=table.numel_of(atom), dtype=dtype)

    if table.dtype_of(source) in (dtype, None):
        return source
    return table.tensor(source.shape, table.map_atoms(source.contents, cast_atom))


def _elementwise(target: OpOverload) -> Rule | None:
    """The rule of an operator on one tensor that treats every element alike."""
    schema = target._schema
    tags = target.tags
    if torch.Tag.pointwise not in tags or torch.Tag.nondeterministic_seeded in tags:
        return None
    if schema.is_mutable or len(schema.returns) != 1:
        return None

    def rule(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
        tensors = [item for item in arguments if isinstance(item, (TensorValue, OtherValue))]
        if len(tensors) != 1 or not isinstance(arguments[0], TensorValue):
            return None
        if not isinstance(recorded, torch.Tensor):
            return None
        if any(isinstance(item, (list, tuple)) for item in arguments):
            return None
        source, dtype = arguments[0], recorded.dtype
        constants = tuple(map(frozen_literal, arguments[1:]))

        def computed(atom: int) -> int:
            definition = ("elementwise", target, atom, *constants)
            return table.atom(definition, numel=table.numel_of(atom), dtype=dtype)

        return table.tensor(source.shape, table.map_atoms(source.contents, computed))

    return rule


def _pack(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """``pack_bucket``: the parts of all members, row by row, cast."""
    members, num_rows, dtype = arguments
    if not all(isinstance(member, TensorValue) for member in members):
        return None
    if any(math.prod(member.shape) % num_rows for member in members):
        return None
    cast = [_in_dtype(table, member, dtype) for member in members]
    return layout_dataflow.joined_rows(table, cast, num_rows)


def _copy_into(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """``copy_``: what the written tensor holds afterwards."""
    destination, source = arguments[:2]
    if not isinstance(destination, TensorValue) or not isinstance(source, TensorValue):
        return None
    cast = _in_dtype(table, source, recorded.dtype)
    return layout_dataflow.broadcast(table, cast, destination.shape)


_NAMES_BY_RULE: Mapping[Rule, Sequence[str]] = {
    _same: (
        "aten::alias",
        "aten::detach",
        "aten::lift_fresh",
        "prims::view_of",
        "_c10d_functional::wait_tensor",
        "gt_passes::wait_copy",
    ),
    _copy: (
        "aten::clone",
        "aten::contiguous",
        "aten::lift_fresh_copy",
        "prims::device_put",
        "gt_passes::offload",
        "gt_passes::reload",
    ),
    _cast: ("aten::_to_copy", "prims::convert_element_type", "aten::to"),
    layout_dataflow.reshape: ("aten::reshape", "aten::flatten"),
    layout_dataflow.view: (
        "aten::view",
        "aten::_unsafe_view",
        "aten::unflatten",
        "aten::squeeze",
        "aten::unsqueeze",
    ),
    layout_dataflow.permute: ("aten::permute",),
    layout_dataflow.transpose: ("aten::t", "aten::transpose"),
    layout_dataflow.expand: ("aten::expand",),
    layout_dataflow.slice_dim: ("aten::slice",),
    layout_dataflow.narrow: ("aten::narrow",),
    layout_dataflow.select: ("aten::select",),
    layout_dataflow.split: (
        "aten::split",
        "aten::split_with_sizes",
        "aten::split_with_sizes_copy",
        "aten::chunk",
        "aten::unsafe_split",
        "aten::unsafe_chunk",
        "aten::unsafe_split_with_sizes",
    ),
    layout_dataflow.unbind: ("aten::unbind",),
    layout_dataflow.cat: ("aten::cat",),
    layout_dataflow.stack: ("aten::stack",),
    _copy_into: ("aten::copy_",),
    _pack: ("gt_passes::pack_bucket",),
    layout_dataflow.cut_rows: ("gt_passes::unpack_bucket",),
}
"""Qualified names of operators, each with all of its overloads."""

_RULES = {name: rule for rule, names in _NAMES_BY_RULE.items() for name in names}

_COLLECTIVES: dict[str, Rule] = {
    "all_reduce": collective_dataflow.all_reduce,
    "all_reduce_": collective_dataflow.all_reduce,
    "all_reduce_coalesced": collective_dataflow.all_reduce,
    "all_gather_into_tensor": collective_dataflow.all_gather,
    "all_gather_into_tensor_out": collective_dataflow.all_gather,
    "all_gather_into_tensor_coalesced": collective_dataflow.all_gather,
    "reduce_scatter_tensor": collective_dataflow.reduce_scatter,
    "reduce_scatter_tensor_out": collective_dataflow.reduce_scatter,
    "reduce_scatter_tensor_coalesced": collective_dataflow.reduce_scatter,
}

_COLLECTIVE_RULES = frozenset(_COLLECTIVES.values())

# An overload of a name above that does something else.
_WITHOUT_RULE = frozenset({_aten.view.dtype})

_known_rules: dict[OpOverload, Rule | None] = {}


def _rule_of(target: OpOverload) -> Rule | None:
    if target not in _known_rules:
        _known_rules[target] = _find_rule(target)
    return _known_rules[target]


def _find_rule(target: OpOverload) -> Rule | None:
    if target in _WITHOUT_RULE:
        return None
    namespace, name = target._schema.name.split("::")
    if namespace in ("_c10d_functional", "_c10d_functional_autograd") and name in _COLLECTIVES:
        return _COLLECTIVES[name]
    return _RULES.get(target._schema.name) or _elementwise(target)
