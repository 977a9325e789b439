"""What a node does besides making its result, as the verifier and careful passes see it.

``aliasing`` says which memory is shared and written. This module answers the rest: may anything
move past the node, does it draw random numbers, does it read the data of its arguments at all. What
PyTorch's schemas and tags do not promise is taken not to hold.
"""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import torch
from torch.fx import Node

from gt_passes._torch_internals import OpOverload, has_declared_effect
from gt_passes.analysis.aliasing import has_unknown_effects, may_write
from gt_passes.analysis.collectives import is_collective, is_wait
from gt_passes.analysis.node_calls import arguments_of
from gt_passes.analysis.operator_aliases import only_makes_views
from gt_passes.analysis.outlined_region import region_of

_aten = torch.ops.aten

_KNOWN_NAMESPACES = frozenset(
    {
        "aten",
        "prims",
        "_c10d_functional",
        "_c10d_functional_autograd",
        "_dtensor",
        "symm_mem",
        "gt_trace",  # operators of aten that take the grad mode as an argument
    }
)
"""Operators of PyTorch and gt-trace: their schemas and tags say everything that they do."""

_TAGS_OF_PURE_OPERATORS = frozenset(
    {torch.Tag.core, torch.Tag.pointwise, torch.Tag.reduction, torch.Tag.view_copy}
)
"""With one of these, whoever defined an operator says that it computes and does nothing else."""

_DECLARED_PURE: set[str] = set()

# By identity: operators are slow to hash, and PyTorch keeps these.
_METADATA_READERS = frozenset(
    map(
        id,
        (
            _aten.sym_size.int,
            _aten.sym_stride.int,
            _aten.sym_numel.default,
            _aten.sym_storage_offset.default,
        ),
    )
)

_ASSERTS = ("_assert_", "sym_constrain_range", "_sym_constrain_range", "_linalg_check_errors")

_LAYOUT_READERS = frozenset(
    {
        "aten::as_strided",
        "aten::as_strided_",
        "aten::as_strided_copy",
        "aten::as_strided_scatter",
        "aten::_reshape_alias",
        "aten::sym_storage_offset",
        "aten::sym_stride",
    }
)


def declare_pure_operator(name: str) -> None:
    """Say of an operator outside PyTorch that it computes its result and does nothing else.

    For whoever knows an operator that its author did not tag; what it writes and aliases is still
    read off its schema.

    Args:
        name: qualified name without overload, as ``mylib::fused_norm``.

    Raises:
        ValueError: the name is not of that form.
    """
    namespace, separator, operator_name = name.partition("::")
    if not (namespace and separator and operator_name) or "." in name:
        raise ValueError(f"{name!r} is not a qualified name, as 'mylib::fused_norm'")
    _DECLARED_PURE.add(name)
    _effects_of.cache_clear()


class _Effects(NamedTuple):
    """What the schema and the tags of an operator say."""

    is_unknown: bool
    is_random: bool
    is_random_if_dropout: bool
    is_view: bool


def is_barrier(node: Node) -> bool:
    """Whether nothing may move across a node, because not all that it does is known.

    Higher-order operators and functions that are not known to be pure, and operators outside
    PyTorch without a tag of pure operators. A schema only says what happens to the arguments: a
    custom operator may also log, count, or use a network.
    """
    if node.op != "call_function":
        return has_unknown_effects(node)
    if isinstance(node.target, OpOverload):
        return _effects_of(node.target).is_unknown
    region = region_of(node)
    if region is not None:
        return any(map(is_barrier, region.body.graph.nodes))
    return has_unknown_effects(node)


def draws_random_numbers(node: Node) -> bool:
    """Whether a node advances a random number generator.

    Attention without dropout does not, though its operator can.
    """
    region = region_of(node)
    if region is not None:
        return any(map(draws_random_numbers, region.body.graph.nodes))
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    effects = _effects_of(node.target)
    if effects.is_random_if_dropout:
        return bool(arguments_of(node)["dropout_p"])
    return effects.is_random


def has_other_effect(node: Node) -> bool:
    """Whether a call has an effect that is no write, no random draw and no communication.

    Operators with a registered effect have one, such as those that print, and asserts.
    """
    target = node.target
    if not isinstance(target, OpOverload) or may_write(target):
        return False
    if is_collective(node) or is_wait(node) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return not target._schema.returns or has_declared_effect(node)


def only_asserts(node: Node) -> bool:
    """Whether the effect of a node is to stop a step that is wrong: its place does not matter."""
    if not isinstance(node.target, OpOverload):
        return False
    namespace, _, name = node.target._schema.name.partition("::")
    return namespace == "aten" and name.removeprefix("_functional").startswith(_ASSERTS)


def is_only_a_view(node: Node) -> bool:
    """Whether a node makes another view of its argument and reads none of its data."""
    if node.op != "call_function":
        return False
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    return _effects_of(node.target).is_view


def reads_only_metadata(node: Node) -> bool:
    """Whether a node asks for a size or stride, which does not depend on data."""
    return id(node.target) in _METADATA_READERS


def reads_memory_layout(node: Node) -> bool:
    """Whether a node's result depends on how its arguments lie in memory, besides their elements.

    ``as_strided`` addresses the whole storage of its argument, as it was laid out.
    """
    return isinstance(node.target, OpOverload) and node.target._schema.name in _LAYOUT_READERS


@functools.cache
def _effects_of(target: OpOverload) -> _Effects:
    schema, tags = target._schema, set(target.tags)
    is_random = torch.Tag.nondeterministic_seeded in tags
    has_dropout = any(argument.name == "dropout_p" for argument in schema.arguments)
    return _Effects(
        is_unknown=(
            target.namespace not in _KNOWN_NAMESPACES
            and not tags & _TAGS_OF_PURE_OPERATORS
            and schema.name not in _DECLARED_PURE
        ),
        is_random=is_random and not has_dropout,
        is_random_if_dropout=is_random and has_dropout,
        is_view=only_makes_views(target),
    )
