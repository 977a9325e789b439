"""Find the collectives of tensor parallelism that stand next to a matrix product.

Sequence parallelism gathers an activation right before the products that read it, and reduces and
scatters a product right after it. Collectives work on dim 0 only, so that other dims are cut and
put together around them::

    g = all_gather_into_tensor(x, 8, "tp");  w = wait_tensor(g)      # x: [B, T/8, D]
    a = cat(split(w, B), 1)                                          # a: [B, T, D]
    y = mm(view(a, [B*T, D]), b)

    p = view(mm(h, b), [B, T, D])
    g = reduce_scatter_tensor(cat(split(p, T/8, 1)), "sum", 8, "tp");  r = wait_tensor(g)

A product that is scattered may be of operands in 8 bits (``_scaled_mm``).

What PyTorch writes there is read off its functional collectives
(``torch/distributed/_functional_collectives.py``); Inductor recognizes the same in
``torch/_inductor/fx_passes/micro_pipeline_tp.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from gt_passes._torch_internals import value_of
from gt_passes.analysis.collectives import is_wait
from gt_passes.analysis.fsdp_collective import fsdp_collective
from gt_passes.analysis.operator_effects import is_only_a_view

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_RESHAPES = frozenset({_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default})


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredOperand:
    """An activation gathered from the ranks of a group, and the products that read it."""

    launch: Node
    shard: Node
    gather_dim: int
    group_name: str
    result: Node
    """The whole activation."""

    matmuls: tuple[Node, ...]
    """Products whose left operand it is, seen as a matrix, in execution order."""

    internals: tuple[Node, ...]
    """All nodes from the launch to the result, in execution order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatteredProduct:
    """A product that is summed over a group and scattered to its ranks."""

    launch: Node
    matmul: Node | None
    """None where what is scattered is not a product."""

    num_readers: int
    """How many read the product, or a view of it; 1 where it is only scattered."""

    scatter_dim: int
    reduce_op: str
    group_name: str
    shape: tuple[int, ...]
    """The shape of what is scattered, before it is."""

    result: Node
    """This rank's part."""

    internals: tuple[Node, ...]
    """All nodes from the product to the result, in execution order."""


def find_gathered_operands(graph: Graph) -> Iterator[GatheredOperand]:
    """Every all-gather that is not FSDP's, with the products that read it, maybe none."""
    for launch in graph.find_nodes(op="call_function", target=_c10d.all_gather_into_tensor.default):
        wait = _only_wait(launch)
        if wait is None or fsdp_collective(launch) is not None:
            continue
        shard, num_ranks, group_name = launch.args
        assert isinstance(shard, Node)
        assert isinstance(num_ranks, int)
        cat = _reader_that_joins(wait)
        joined = None if cat is None else _cut(_parts(cat))
        if cat is not None and joined == (wait, 0) and len(_parts(cat)) == num_ranks:
            result, gather_dim = cat, _dim(cat, 1)
            internals = (launch, wait, *_cutters(_parts(cat)), cat)
        elif (seen := _seen_along_another_dim(shard, wait, num_ranks)) is not None:
            result, gather_dim = seen
            internals = (launch, wait, result)
        else:
            result, gather_dim, internals = wait, 0, (launch, wait)
        yield GatheredOperand(
            launch=launch,
            shard=shard,
            gather_dim=gather_dim,
            group_name=str(group_name),
            result=result,
            matmuls=tuple(_matmuls_of(result)),
            internals=internals,
        )


def find_scattered_products(graph: Graph) -> Iterator[ScatteredProduct]:
    """Every reduce-scatter that is not FSDP's, with the product that it sums, maybe none."""
    for launch in graph.find_nodes(op="call_function", target=_c10d.reduce_scatter_tensor.default):
        wait = _only_wait(launch)
        if wait is None or fsdp_collective(launch) is not None:
            continue
        given, reduce_op, num_ranks, group_name = launch.args
        assert isinstance(given, Node)
        source, scatter_dim, internals = given, 0, [launch, wait]
        if given.target is _aten.cat.default and _dim(given, 1) == 0:
            cut = _cut(_parts(given))
            if cut is not None and len(_parts(given)) == num_ranks and len(given.users) == 1:
                source, scatter_dim = cut
                internals = [*_cutters(_parts(given)), given, *internals]
        matmul, num_readers = source, len({*source.users} - {*internals}) + 1
        if source.target in _RESHAPES and isinstance(source.args[0], Node):
            matmul = source.args[0]
            num_readers += len(matmul.users) - 1
            internals.insert(0, source)
        is_matmul = matmul.target in (_aten.mm.default, _aten._scaled_mm.default)
        value = value_of(source)
        assert isinstance(value, torch.Tensor)
        yield ScatteredProduct(
            launch=launch,
            matmul=matmul if is_matmul else None,
            num_readers=num_readers,
            scatter_dim=scatter_dim,
            reduce_op=str(reduce_op),
            group_name=str(group_name),
            shape=tuple(value.shape),
            result=wait,
            internals=(matmul, *internals) if is_matmul else tuple(internals),
        )


def views_of(node: Node) -> Iterator[Node]:
    """The views of a value, and their views."""
    for user in node.users:
        if is_only_a_view(user):
            yield user
            yield from views_of(user)


def _only_wait(launch: Node) -> Node | None:
    users = list(launch.users)
    return users[0] if len(users) == 1 and is_wait(users[0]) else None


def _matmuls_of(result: Node) -> Iterator[Node]:
    value = value_of(result)
    assert isinstance(value, torch.Tensor)
    matrices = [result] if value.ndim == 2 else []
    for user in result.users:
        seen = value_of(user)
        if (
            user.target in _RESHAPES
            and isinstance(seen, torch.Tensor)
            and seen.ndim == 2
            and seen.shape[1] == value.shape[-1]
        ):
            matrices.append(user)
    found = [
        user
        for matrix in matrices
        for user in matrix.users
        if user.target is _aten.mm.default and user.args[0] is matrix and user.args[1] is not matrix
    ]
    return iter(sorted(found))  # nodes compare by their place in the graph


def _seen_along_another_dim(shard: Node, wait: Node, num_ranks: int) -> tuple[Node, int] | None:
    """The view through which a gathered value is read, where dims of size 1 come before the dim.

    ``[1, T/8, D]`` gathered is ``[8, T/8, D]``: in memory that is ``[1, T, D]`` already.
    """
    view = next(iter(wait.users), None)
    part = value_of(shard)
    if view is None or len(wait.users) != 1 or view.target not in _RESHAPES:
        return None
    whole = value_of(view)
    assert isinstance(part, torch.Tensor)
    assert isinstance(whole, torch.Tensor)
    for dim in range(1, part.ndim):
        shape = [size * num_ranks if at == dim else size for at, size in enumerate(part.shape)]
        if list(whole.shape) == shape and all(size == 1 for size in shape[:dim]):
            return view, dim
    return None


def _reader_that_joins(wait: Node) -> Node | None:
    """The cat that all readers of a gathered value lead to, through splits and slices."""
    joins = {
        reader
        for cutter in wait.users
        for part in ([cutter] if cutter.target is _aten.slice.Tensor else cutter.users)
        for reader in part.users
    }
    cut = all(
        cutter.target in (_aten.slice.Tensor, _aten.split.Tensor, _aten.split_with_sizes.default)
        for cutter in wait.users
    )
    if not cut or len(joins) != 1:
        return None
    (cat,) = joins
    return cat if cat.target is _aten.cat.default else None


def _parts(cat: Node) -> tuple[Node, ...]:
    parts = cat.args[0]
    assert isinstance(parts, (tuple, list))
    return tuple(part for part in parts if isinstance(part, Node))


def _cut(parts: Sequence[Node]) -> tuple[Node, int] | None:
    """The value and the dim of which the parts are all, in order and of equal size; or None."""
    sources = {_source_of_part(part, number) for number, part in enumerate(parts)}
    if len(sources) != 1:
        return None
    (cut,) = sources
    if cut is None:
        return None
    source, dim = cut
    whole = value_of(source)
    sizes = [getattr(value_of(part), "shape", ()) for part in parts]
    if not isinstance(whole, torch.Tensor) or any(len(size) != whole.ndim for size in sizes):
        return None
    each = whole.shape[dim] // len(parts)
    if whole.shape[dim] % len(parts) or any(size[dim] != each for size in sizes):
        return None
    return cut


def _source_of_part(part: Node, number: int) -> tuple[Node, int] | None:
    if part.target is _aten.slice.Tensor:
        source = part.args[0]
        start = part.args[2] if len(part.args) > 2 else 0
        step = part.args[4] if len(part.args) > 4 else 1
        value = value_of(part)
        if not isinstance(source, Node) or not isinstance(value, torch.Tensor) or step != 1:
            return None
        dim = _dim(part, 1)
        return (source, dim) if start == number * value.shape[dim] else None
    if part.target is not operator.getitem or part.args[1] != number:
        return None
    split = part.args[0]
    if not isinstance(split, Node) or split.target not in (
        _aten.split.Tensor,
        _aten.split_with_sizes.default,
    ):
        return None
    source = split.args[0]
    return (source, _dim(split, 2)) if isinstance(source, Node) else None


def _cutters(parts: Sequence[Node]) -> tuple[Node, ...]:
    """The splits before the parts, once each, and the parts."""
    splits = [part.args[0] for part in parts if part.target is operator.getitem]
    return (*dict.fromkeys(split for split in splits if isinstance(split, Node)), *parts)


def _dim(node: Node, position: int) -> int:
    """The argument ``dim`` of a node, counted from the front."""
    given = node.args[position] if position < len(node.args) else node.kwargs.get("dim", 0)
    assert isinstance(given, int)
    argument = node.args[0]
    first = argument[0] if isinstance(argument, (tuple, list)) else argument
    assert isinstance(first, Node)
    tensor = value_of(first)
    assert isinstance(tensor, torch.Tensor)
    return given % tensor.ndim
