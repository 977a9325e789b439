"""Arguments whose memory the results of operators may share: by schema, and as measured.

Schemas declare aliases, and passes believe schemas. Some kernels do differently: ``unsafe_split``
returns views that its schema denies, ``type_as`` returns its argument if the dtype fits, and
``reshape`` copies where its schema promises a view. ``tests/measured_aliases.py`` runs the
operators of PyTorch, compares the storages of arguments and results, and prints the tables below.
A slow test measures again and compares. An operator in doubt belongs in ``MAY_SHARE``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from gt_passes._torch_internals import OpOverload, device_of, value_of

ALWAYS_SHARES: Mapping[str, tuple[str, ...]] = {
    "aten::_no_grad_embedding_renorm_": ("weight",),
    "aten::_pack_sequence": ("output", "batch_sizes", "sorted_indices", "unsorted_indices"),
    "aten::_remove_batch_dim": ("self",),
    "aten::_saturate_weight_to_fp16": ("weight",),
    "aten::_unsafe_view": ("self",),
    "aten::atleast_1d": ("self", "tensors"),
    "aten::atleast_2d": ("self", "tensors"),
    "aten::atleast_3d": ("self", "tensors"),
    "aten::broadcast_tensors": ("tensors",),
    "aten::data": ("self",),
    "aten::lift": ("self",),
    "aten::meshgrid": ("tensors",),
    "aten::unsafe_chunk": ("self",),
    "aten::unsafe_split": ("self",),
    "aten::unsafe_split_with_sizes": ("self",),
}
"""Arguments whose memory the results of an operator always share, which its schema denies."""

MAY_SHARE: Mapping[str, tuple[str, ...]] = {
    "aten::_cast_Byte": ("self",),
    "aten::_cast_Char": ("self",),
    "aten::_cast_Double": ("self",),
    "aten::_cast_Float": ("self",),
    "aten::_cast_Half": ("self",),
    "aten::_cast_Int": ("self",),
    "aten::_cast_Long": ("self",),
    "aten::_cast_Short": ("self",),
    "aten::_to_cpu": ("tensors",),
    "aten::alpha_dropout": ("input",),
    "aten::cartesian_prod": ("tensors",),
    "aten::chalf": ("self",),
    "aten::conj_physical": ("self",),
    "aten::cumprod_backward": ("grad",),
    "aten::dropout": ("input",),
    "aten::einsum": ("tensors",),
    "aten::feature_alpha_dropout": ("input",),
    "aten::feature_dropout": ("input",),
    "aten::flatten_dense_tensors": ("tensors",),
    "aten::histogramdd": ("bins",),
    "aten::native_dropout": ("input",),
    "aten::set": ("source",),
    "aten::sorted": ("input",),
    "aten::sum_to_size": ("self",),
    "aten::to_dense": ("self",),
    "aten::to_dense_backward": ("grad",),
    "aten::type_as": ("self",),
    "aten::unflatten_dense_tensors": ("flat",),
    "prims::device_put": ("a",),
}
"""Arguments whose memory the results of an operator share in some calls, as its schema denies."""

MAY_COPY = frozenset(
    {
        "aten::_autocast_to_full_precision",
        "aten::_autocast_to_reduced_precision",
        "aten::_grad_sum_to_size",
        "aten::_ncf_view",
        "aten::as_tensor",
        "aten::contiguous",
        "aten::flatten",
        "aten::pin_memory",
        "aten::ravel",
        "aten::reshape",
        "aten::reshape_as",
        "aten::resolve_conj",
        "aten::resolve_neg",
        "aten::to",
    }
)
"""Operators whose schemas declare an alias, and which copy in some calls."""


@dataclass(frozen=True, slots=True)
class AliasedArgument:
    """One argument of an operator that shares memory with a result, or is written to."""

    name: str
    position: int | None
    """None for an argument that is given by name only."""

    is_written: bool
    is_certain: bool
    """Whether the result always shares the memory, as a view does."""

    def of(self, node: Node) -> Any:
        """The argument of a node that calls the operator."""
        if self.position is not None and self.position < len(node.args):
            return node.args[self.position]
        return node.kwargs.get(self.name)

    def may_alias(self, node: Node) -> bool:
        """Whether the results of a node may share the memory of this argument."""
        if self.is_certain:
            return True
        if node.target is torch.ops.aten.native_dropout.default:
            train = node.args[2] if len(node.args) > 2 else node.kwargs.get("train")
            return train is False
        source, result = self.of(node), value_of(node)
        given = value_of(source) if isinstance(source, Node) else None
        if not isinstance(given, torch.Tensor) or not isinstance(result, torch.Tensor):
            return True
        # What such an operator returns without a copy is a view of the same elements.
        return given.dtype == result.dtype and device_of(given) == device_of(result)


# Schemas are read through pybind, which is slow, and a graph calls few operators often.
@functools.cache
def aliased_arguments(target: OpOverload) -> tuple[AliasedArgument, ...]:
    """Every argument of an operator that shares memory with a result or is written to."""
    name, is_certain = target._schema.name, not may_copy_instead(target)
    measured = (*ALWAYS_SHARES.get(name, ()), *MAY_SHARE.get(name, ()))
    return tuple(
        AliasedArgument(
            name=declared.name,
            position=None if declared.kwarg_only else position,
            is_written=declared.alias_info is not None and declared.alias_info.is_write,
            is_certain=is_certain,
        )
        for position, declared in enumerate(target._schema.arguments)
        if declared.alias_info is not None or declared.name in measured
    )


@functools.cache
def has_aliased_results(target: OpOverload) -> bool:
    """Whether a result of an operator may share the memory of an argument."""
    schema = target._schema
    if schema.name in ALWAYS_SHARES or schema.name in MAY_SHARE:
        return True
    return any(result.alias_info is not None for result in schema.returns)


def may_copy_instead(target: OpOverload) -> bool:
    """Whether an operator returns its argument's memory in some calls and copies in others."""
    return target._schema.name in MAY_COPY or target._schema.name in MAY_SHARE


@functools.cache
def only_makes_views(target: OpOverload) -> bool:
    """Whether every result of an operator is a view of its arguments, whatever these are."""
    schema = target._schema
    if schema.is_mutable or may_copy_instead(target):
        return False
    if schema.name in ALWAYS_SHARES:
        return True
    return bool(schema.returns) and all(each.alias_info is not None for each in schema.returns)


@functools.cache
def result_sources(target: OpOverload) -> tuple[AliasedArgument | None, ...]:
    """The argument whose memory each result of an operator may share; None for one that is new."""
    schema = target._schema
    aliased = aliased_arguments(target)
    if schema.name in ALWAYS_SHARES or schema.name in MAY_SHARE:
        # Several arguments are aliased by as many results, each by its own.
        by_result = (*aliased, *[None] * len(schema.returns))
        return by_result[: len(schema.returns)]
    labels: dict[str, AliasedArgument] = {}
    named = {each.name: each for each in aliased}
    for declared in schema.arguments:
        if declared.alias_info is not None:
            labels |= dict.fromkeys(declared.alias_info.before_set, named[declared.name])
    sources: list[AliasedArgument | None] = []
    for result in schema.returns:
        if result.alias_info is None:
            sources.append(None)
            continue
        known = (labels[each] for each in sorted(result.alias_info.before_set) if each in labels)
        # PyTorch does not show the labels of lists; such operators have one aliased argument.
        sources.append(next(known, next(iter(aliased), None)))
    return tuple(sources)
