"""What operators do to values: which ones only move elements, and how.

A rule is exact: it says which elements of which values the result consists of. Where a rule does
not apply, it returns None, and the result is a new value known by its operator and arguments. So an
operator without a rule costs precision (a pass that rewrites it is doubted), never soundness.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from gt_passes._torch_internals import OpOverload
from gt_passes.analysis.call_form import CallForm
from gt_passes.analysis.graph_constants import frozen_literal
from gt_passes.analysis.graph_scan import NodeCall
from gt_passes.analysis.node_calls import with_defaults
from gt_passes.verifier.dataflow import (
    collective_dataflow,
    complex_dataflow,
    layout_dataflow,
    quantized_gathers,
)
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
    call: NodeCall,
    operands: Sequence[Value],
    group_of: Callable[[str], str],
) -> Value | None:
    """The value of a call by the rule of its operator; None where there is none that applies.

    Args:
        table: knows all values.
        call: of a function.
        operands: the values of the call's operands.
        group_of: the name under which a process group is known.
    """
    form, _ = call.split()
    if not isinstance(form.target, OpOverload):
        return item_of(call, operands[0]) if operands else None
    known = table.rules.get(form)
    if known is None:
        rule = None if _may_not_be_done(call) else _rule_for(form)
        known = (rule, _open_arguments(call))
        if form.is_exact:
            table.rules[form] = known
    rule, open_arguments = known
    if rule is None:
        return None
    arguments = list(open_arguments)
    for index, argument in enumerate(open_arguments):
        if type(argument) is _Operand:
            arguments[index] = operands[argument]
        elif type(argument) is list:
            arguments[index] = [
                operands[item] if type(item) is _Operand else item for item in argument
            ]
    if rule in _COLLECTIVE_RULES:
        arguments = [group_of(item) if isinstance(item, str) else item for item in arguments]
    value = rule(table, arguments, call.value)
    of_one_piece = rule in _RULES_OF_ONE_PIECE or rule in _elementwise_rules
    # What an atom stands for may matter to a cast to 8 bits.
    of_one_piece &= not quantized_gathers.is_cast_to_float8(call.value)
    if of_one_piece and form.is_exact and len(operands) == 1:
        table.note(form, operands[0], value)
    return value


def _may_not_be_done(call: NodeCall) -> bool:
    """Whether a call returns a copy before it is done: the host must not read it at once."""
    assert isinstance(call.target, OpOverload)  # others have no rule
    arguments = with_defaults(call.target, call.args, call.kwargs)
    return arguments.get("non_blocking") is True


class _Operand(int):
    """The index of an operand, where a call has one among its arguments."""


def _open_arguments(call: NodeCall) -> list[Any]:
    """All arguments of a call, in the order of the schema, with indices of operands for nodes."""
    indices = itertools.count()

    def opened(argument: Any) -> Any:
        if isinstance(argument, Node):
            return _Operand(next(indices))
        return list(map(opened, argument)) if isinstance(argument, (tuple, list)) else argument

    # In the order in which ``call_form`` counts operands.
    args = list(map(opened, call.args))
    kwargs = {name: opened(call.kwargs[name]) for name in sorted(call.kwargs)}
    assert isinstance(call.target, OpOverload)  # others have no rule with arguments
    return list(with_defaults(call.target, args, kwargs).values())


def item_of(call: NodeCall, value: Value) -> Value | None:
    """What ``operator.getitem`` takes of several values; None of any other call or value."""
    if call.target is not operator.getitem or len(call.args) != 2:
        return None
    source, index = call.args
    if not isinstance(source, Node) or not isinstance(index, int):
        return None
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
        gathered = quantized_gathers.quantized_gather(table, atom, dtype)
        if gathered is not None:
            return gathered
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
        source, *others = arguments
        if not isinstance(source, TensorValue) or not isinstance(recorded, torch.Tensor):
            return None
        if any(isinstance(item, (TensorValue, OtherValue, list, tuple)) for item in others):
            return None
        dtype = recorded.dtype
        constants = tuple(map(frozen_literal, others))

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
        "aten::resolve_conj",
        "aten::resolve_neg",
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
    complex_dataflow.conjugate: (
        "aten::_conj",
        "aten::_conj_physical",
        "aten::conj_physical",
        "aten::conj",
    ),
    complex_dataflow.negative_view: ("aten::_neg_view",),
    complex_dataflow.as_real: ("aten::view_as_real",),
    complex_dataflow.as_complex: ("aten::view_as_complex",),
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

_RULES_OF_ONE_PIECE = frozenset(
    {
        _same,
        _copy,
        _cast,
        layout_dataflow.reshape,
        layout_dataflow.view,
        layout_dataflow.permute,
        layout_dataflow.transpose,
        layout_dataflow.expand,
        layout_dataflow.slice_dim,
        layout_dataflow.narrow,
        layout_dataflow.select,
    }
)
"""Whose result is decided by the form of the call, how the operand lies in its atom, and dtype."""

_COLLECTIVE_RULES = frozenset(_COLLECTIVES.values())

_RULES_OF_OVERLOADS: Mapping[OpOverload, Rule] = {
    _aten.view.dtype: quantized_gathers.same_bits,
    _aten.max.default: quantized_gathers.maximum,
}
"""Of overloads that do something else than others of their name."""

_elementwise_rules: set[Rule | None] = set()

_known_rules: dict[OpOverload, Rule | None] = {}


def _rule_for(form: CallForm) -> Rule | None:
    assert isinstance(form.target, OpOverload)  # others have none
    rule = _rule_of(form.target)
    if form.num_operands > 1 and rule in _elementwise_rules:
        # What treats every element of one tensor alike says nothing about two.
        return quantized_gathers.scaled if form.target is _aten.mul.Tensor else None
    return rule


def _rule_of(target: OpOverload) -> Rule | None:
    if target not in _known_rules:
        _known_rules[target] = _find_rule(target)
    return _known_rules[target]


def _find_rule(target: OpOverload) -> Rule | None:
    if target in _RULES_OF_OVERLOADS:
        return _RULES_OF_OVERLOADS[target]
    namespace, name = target._schema.name.split("::")
    if namespace in ("_c10d_functional", "_c10d_functional_autograd") and name in _COLLECTIVES:
        return _COLLECTIVES[name]
    rule = _RULES.get(target._schema.name)
    if rule is None:
        rule = _elementwise(target)
        _elementwise_rules.add(rule)
    return rule
