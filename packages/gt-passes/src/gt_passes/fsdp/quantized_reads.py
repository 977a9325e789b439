"""By which operators a gathered parameter is read in 8 bits, found by their form.

::

    amax  = max(abs(w))                                             # w: gathered, or a view of it
    scale = float32(reciprocal(clamp(float64(amax), 1e-12)) * 448)  # or other arithmetic
    q     = float8(clamp(float32(w) * scale, -448, 448))

Which library wrote them does not matter. What counts is that the scale is made of the largest of
all magnitudes, and that nobody reads the parameter for anything else.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from gt_passes._torch_internals import OpOverload, value_of
from gt_passes.analysis.collectives import is_wait
from gt_passes.analysis.operator_effects import is_only_a_view

_aten = torch.ops.aten
_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
_FLOAT8 = frozenset(
    {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedRead:
    """One cast to 8 bits of a gathered parameter."""

    views: tuple[Node, ...]
    """From what was gathered to what is quantized, in order."""

    operators: tuple[Node, ...]
    """What is done to every element: perhaps a cast, a product, perhaps a clamp, the cast."""

    @property
    def scale(self) -> Node:
        """By what every element is multiplied."""
        (product,) = (each for each in self.operators if each.target is _aten.mul.Tensor)
        scale = product.args[1]
        assert isinstance(scale, Node)  # as it was matched
        return scale


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedReads:
    """All that a gathered parameter is read for, which is to be quantized in one way."""

    reads: tuple[QuantizedRead, ...]

    scales: tuple[tuple[Node, ...], ...]
    """Computations of the one scale: from the maximum on, in order."""

    replaced: tuple[Node, ...]
    """Everything between the gathering and what is made of scales and casts, in graph order."""

    @property
    def form(self) -> Hashable:
        """What parameters have in common whose scales may be computed together."""
        return tuple(map(form_of, self.scales[0]))


def find_quantized_reads(wait: Node) -> QuantizedReads | str | None:
    """Find by what a gathered parameter is quantized.

    Args:
        wait: of its gathering.

    Returns:
        None for a parameter that nobody quantizes; a reason for one that must be gathered as it is.
    """
    views = _views_of(wait)
    reads: list[QuantizedRead] = []
    magnitudes: list[Node] = []
    others: list[Node] = []
    for source, chain in views.items():
        for reader in source.users:
            if reader in views:
                continue
            operators = _cast_to_float8(source, reader)
            if operators:
                reads.append(QuantizedRead(views=chain, operators=operators))
            else:
                (magnitudes if reader.target is _aten.abs.default else others).append(reader)
    if not reads:
        return None
    if others:
        return f"{others[0].name} reads it as it is"
    if any(_tensor(each.scale).dim() for each in reads):
        return "it has a scale for each row or column, which ranks would have to gather too"
    maxima = [user for each in magnitudes for user in each.users]
    scales = [_from_maximum(scale) for scale in dict.fromkeys(each.scale for each in reads)]
    whole = [chain for chain in scales if chain and chain[0] in maxima]
    if len(whole) < len(scales) or {chain[0] for chain in whole} < set(maxima):
        return "its scale is not that of its largest magnitude alone"
    forms = {tuple(map(form_of, chain)) for chain in whole}
    casts = {tuple(map(form_of, each.operators)) for each in reads}
    if len(forms) > 1 or len(casts) > 1:
        return "it is quantized in several ways"
    inner = [node for chain in whole for node in chain[:-1]]
    if any(len(node.users) > 1 for node in inner):
        return "something else is made of its largest magnitude"
    return QuantizedReads(
        reads=tuple(reads),
        scales=tuple(whole),
        replaced=_in_order(
            [*views, *magnitudes, *(node for chain in whole for node in chain)],
            (node for each in reads for node in each.operators),
        ),
    )


def form_of(node: Node) -> Hashable:
    """What a node does, whatever it does it to."""

    def frozen(argument: object) -> Hashable:
        return Node if isinstance(argument, Node) else repr(argument)

    return node.target, tuple(map(frozen, node.args)), repr(sorted(node.kwargs.items()))


def _views_of(wait: Node) -> dict[Node, tuple[Node, ...]]:
    """The gathered value and the views of all of it, each with those between."""
    views: dict[Node, tuple[Node, ...]] = {wait: ()}
    pending = [wait]
    while pending:
        source = pending.pop()
        for user in source.users:
            if user not in views and _is_view_of_all(user, source):
                views[user] = (*views[source], user)
                pending.append(user)
    return views


def _is_view_of_all(node: Node, source: Node) -> bool:
    value, given = value_of(node), value_of(source)
    if not isinstance(value, torch.Tensor) or not isinstance(given, torch.Tensor):
        return False
    if not is_only_a_view(node) or node.all_input_nodes != [source]:
        return False
    # Two sizes that data decide cannot be compared, and are no weight's.
    sizes = (value.numel(), given.numel())
    return value.dtype == given.dtype and {*map(type, sizes)} == {int} and sizes[0] == sizes[1]


def _cast_to_float8(source: Node, reader: Node) -> tuple[Node, ...]:
    """The operators from a reader of ``source`` to a cast to 8 bits; empty if it is no such."""
    operators = [reader]
    while operators[-1].target is not _aten._to_copy.default or not _is_float8(operators[-1]):
        node = operators[-1]
        if not _is_step_of_cast(node, source, is_first=len(operators) == 1):
            return ()
        if len(node.users) != 1:
            return ()
        source = node
        operators += node.users
    largest = torch.finfo(_tensor(operators[-1]).dtype).max
    clamps = [node.args[1:] for node in operators if node.target is _aten.clamp.default]
    is_cast = (
        sum(node.target is _aten.mul.Tensor for node in operators) == 1
        and all(repr(bounds) == repr((-largest, largest)) for bounds in clamps)
        and _only_casts(operators[-1])
    )
    return tuple(operators) if is_cast else ()


def _is_step_of_cast(node: Node, source: Node, *, is_first: bool) -> bool:
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        return False
    if node.target is _aten._to_copy.default:
        return is_first and _only_casts(node)
    if node.target is _aten.mul.Tensor:
        first, second = node.args
        return first is source and isinstance(second, Node) and second is not source
    return node.target is _aten.clamp.default and node.all_input_nodes == [source]


def _only_casts(node: Node) -> bool:
    """Whether a copy does no more than to cast."""
    return node.kwargs.keys() == {"dtype"}


def _is_float8(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.dtype in _FLOAT8


def _from_maximum(scale: Node) -> tuple[Node, ...]:
    """How a number is made of a maximum over all elements of something, in order; empty if not."""
    chain = [scale]
    while chain[-1].target is not _aten.max.default:
        node = chain[-1]
        value = value_of(node)
        is_number = isinstance(value, torch.Tensor) and value.dim() == 0
        if not is_number or len(node.all_input_nodes) != 1 or not _is_step_of_scale(node):
            return ()
        chain += node.all_input_nodes
    return tuple(reversed(chain)) if len(chain[-1].all_input_nodes) == 1 else ()


def _is_step_of_scale(node: Node) -> bool:
    """Whether a node does the same to a number as to each of several."""
    if is_wait(node):
        return True
    if node.target is _ALL_REDUCE:
        return bool(node.args[1] == "max")
    if node.target is _aten._to_copy.default:
        return _only_casts(node)
    if not isinstance(node.target, OpOverload):
        return False
    tags = node.target.tags
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _tensor(node: Node) -> torch.Tensor:
    value = value_of(node)
    assert isinstance(value, torch.Tensor)  # as it was matched
    return value


def _in_order(*nodes: Iterable[Node]) -> tuple[Node, ...]:
    return tuple(sorted({node for each in nodes for node in each}))
