"""By which operators a gathered parameter is read in 8 bits, found by their form.

::

    amax  = max(abs(w))                                             # w: gathered, or a view of it
    scale = float32(reciprocal(clamp(float64(amax), 1e-12)) * 448)  # or other exact arithmetic
    scale = exp2(floor(log2(scale)))                                # perhaps
    q     = float8(clamp(float32(w) * scale, -448, 448))

Which library wrote them does not matter. What counts is that the scale is made of the largest of
all magnitudes, to the same bits on every rank, and that nobody reads the parameter for anything
else. Exact arithmetic is done for several parameters at once, and what comes after the first
operator that only approximates for each alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from gt_passes._torch_internals import OpOverload, value_of
from gt_passes.analysis.collectives import is_wait
from gt_passes.analysis.exact_operators import (
    APPROXIMATED_OPERATORS,
    is_exact,
    is_only_a_cast,
)
from gt_passes.analysis.fsdp_collective import fsdp_collective
from gt_passes.analysis.operator_effects import is_only_a_view
from gt_passes.analysis.process_groups import (
    are_axes_of_one_mesh,
    group_name_of,
    place_in_group,
)

_aten = torch.ops.aten
_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
_VIEWS = frozenset(
    {
        "aten::_unsafe_view",
        "aten::alias",
        "aten::detach",
        "aten::expand",
        "aten::narrow",
        "aten::permute",
        "aten::reshape",
        "aten::select",
        "aten::slice",
        "aten::squeeze",
        "aten::t",
        "aten::transpose",
        "aten::unsqueeze",
        "aten::view",
    }
)
"""Of the same elements, wherever they lie: not ``as_strided``, which addresses memory."""

_FLOAT8 = frozenset(
    {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedRead:
    """One cast to 8 bits of a gathered parameter."""

    views: tuple[Node, ...]
    """From what was gathered to what is quantized, in order; the first may take off padding."""

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
    def together(self) -> tuple[Node, ...]:
        """What is done to the maximum that has the same bits for several parameters at once."""
        return tuple(itertools.takewhile(_is_done_together, self.scales[0][1:]))

    @property
    def alone(self) -> tuple[Node, ...]:
        """What is done to the result of that."""
        return self.scales[0][1 + len(self.together) :]

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
            if reader.target is _aten.abs.default:
                magnitudes.append(reader)
                continue
            operators = _path_to_float8(source, reader)
            reason = _reason_not_scaled_cast(source, operators)
            if reason is not None:
                return reason
            if operators:
                reads.append(QuantizedRead(views=chain, operators=operators))
            else:
                others.append(reader)
    if not reads:
        return None
    if others:
        return f"{others[0].name} reads it as it is"
    if any(_tensor(each.scale).dim() for each in reads):
        return "it has a scale for each row or column, which ranks would have to gather too"
    maxima = [user for each in magnitudes for user in each.users]
    whole = [_from_maximum(scale) for scale in dict.fromkeys(each.scale for each in reads)]
    for first in (chain[0] for chain in whole):
        if first.op == "call_function" and first.target is not _aten.max.default:
            return f"its scale is made by {first.name}, which does not round one number exactly"
    if {chain[0] for chain in whole} != set(maxima):
        return "its scale is not that of its largest magnitude alone"
    for node in (node for chain in whole for node in chain if node.target is _ALL_REDUCE):
        if not _is_over_an_axis(node, wait):
            return f"{node.name} reduces its scale over ranks of another mesh than those it is of"
    for chain in whole:
        rest = list(itertools.dropwhile(_is_done_together, chain[1:]))
        if any(node.target is _ALL_REDUCE for node in rest):
            return f"its scale is reduced over ranks after {rest[0].name}, which only approximates"
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
    args, kwargs = map_arg((node.args, sorted(node.kwargs.items())), lambda _: "node")
    return node.target, repr(args), repr(kwargs)


def _views_of(wait: Node) -> dict[Node, tuple[Node, ...]]:
    """The gathered value and the views of all of it but padding, each with those between."""
    views: dict[Node, tuple[Node, ...]] = {wait: ()}
    pending = [wait]
    while pending:
        source = pending.pop()
        for user in source.users:
            is_view = _is_view_of_all(user, source) or _is_without_padding(user, wait)
            if user not in views and is_view:
                views[user] = (*views[source], user)
                pending.append(user)
    return views


def _is_view_of_all(node: Node, source: Node) -> bool:
    if not isinstance(node.target, OpOverload) or node.target._schema.name not in _VIEWS:
        return False
    return _has_as_many(node, source) and _tensor(node).dtype == _tensor(source).dtype


def _is_without_padding(node: Node, wait: Node) -> bool:
    """Whether FSDP takes the padding off again that ranks gave behind the last elements, zeros."""
    if node.target is not _aten.slice.Tensor or [*wait.users] != [node]:
        return False
    own = fsdp_collective(node)
    is_of_fsdp = own is not None and own.kind == "unshard"
    (launch,) = wait.all_input_nodes
    group = group_name_of(launch)
    # Else the verifier could not tell which part is this rank's.
    is_known = group is not None and place_in_group(group) is not None
    return is_of_fsdp and is_known and node.args[:3] == (wait, 0, 0) and len(node.args) == 4


def _has_as_many(node: Node, source: Node) -> bool:
    """Whether a node makes a tensor with as many elements as another has."""
    value, given = value_of(node), value_of(source)
    if not isinstance(value, torch.Tensor) or not isinstance(given, torch.Tensor):
        return False
    # Two sizes that data decide cannot be compared, and are no weight's.
    sizes = (value.numel(), given.numel())
    return {*map(type, sizes)} == {int} and sizes[0] == sizes[1]


def _path_to_float8(source: Node, reader: Node) -> tuple[Node, ...]:
    """The views and elementwise operators from a reader to a cast to 8 bits; empty without one."""
    pending: list[tuple[Node, tuple[Node, ...]]] = [(source, (reader,))]
    seen: set[Node] = set()
    while pending:
        given, path = pending.pop()
        node = path[-1]
        if node in seen or not (is_only_a_view(node) or _is_elementwise(node, given)):
            continue
        if _is_float8(node) and node.target is _aten._to_copy.default:
            return path
        seen.add(node)
        pending += [(node, (*path, user)) for user in node.users]
    return ()


def _is_elementwise(node: Node, source: Node) -> bool:
    """Whether a node makes as many elements as its argument has, perhaps by others' elements."""
    if not isinstance(node.target, OpOverload) or not _has_as_many(node, source):
        return False
    return torch.Tag.pointwise in node.target.tags or node.target is _aten._to_copy.default


def _reason_not_scaled_cast(source: Node, operators: tuple[Node, ...]) -> str | None:
    """Why operators up to a cast to 8 bits are not a cast, a product, a clamp and this cast."""
    for node in operators:
        if is_only_a_view(node):
            return f"{node.name} is no view of all its elements as they are"
    for node in operators[:-1]:
        if len(node.users) > 1:
            return f"{node.name} is read for something else than to quantize it"
        if _tensor(node).dtype != torch.float32:
            return f"{node.name} is not in float32, in which it must be scaled"
    remaining = list(operators)
    if len(remaining) > 1 and is_only_a_cast(remaining[0]):
        source = remaining.pop(0)
    if remaining and _is_product(remaining[0], source):
        remaining.pop(0)
        if remaining[0].target is _aten.clamp.default:
            largest = torch.finfo(_tensor(operators[-1]).dtype).max
            if repr(remaining[0].args[1:]) != repr((-largest, largest)):
                return f"{remaining[0].name} clamps it to other bounds than those of its dtype"
            remaining.pop(0)
        if is_only_a_cast(remaining[0]):
            return None
    return f"{remaining[0].name} is no part of a scaled cast" if remaining else None


def _is_product(node: Node, source: Node) -> bool:
    if node.target is not _aten.mul.Tensor:
        return False
    first, second = node.args
    return first is source and isinstance(second, Node) and second is not source


def _is_float8(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.dtype in _FLOAT8


def _from_maximum(scale: Node) -> tuple[Node, ...]:
    """How a number is made, in order, from a maximum on; or from the last that is no step of it."""
    chain = [scale]
    while _tensor(chain[-1]).dim() == 0 and _is_step_of_scale(chain[-1]):
        chain += chain[-1].all_input_nodes
    return tuple(reversed(chain))


def _is_step_of_scale(node: Node) -> bool:
    """Whether a node does the same to one number on every rank, to the last bit."""
    return node.target in APPROXIMATED_OPERATORS or _is_done_together(node)


def _is_done_together(node: Node) -> bool:
    """Whether a node does the same to a number as to each of several, to the last bit."""
    if node.target is _ALL_REDUCE:
        return bool(node.args[1] == "max")
    return is_wait(node) or is_exact(node)


def _is_over_an_axis(reduction: Node, wait: Node) -> bool:
    """Whether a reduction is over an axis of the mesh of a gathering that is waited for."""
    (launch,) = wait.all_input_nodes
    over, group = group_name_of(reduction), group_name_of(launch)
    return over is not None and group is not None and are_axes_of_one_mesh(over, group)


def _tensor(node: Node) -> torch.Tensor:
    value = value_of(node)
    assert isinstance(value, torch.Tensor)  # as it was matched
    return value


def _in_order(*nodes: Iterable[Node]) -> tuple[Node, ...]:
    return tuple(sorted({node for each in nodes for node in each}))
