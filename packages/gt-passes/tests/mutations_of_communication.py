"""Bugs around collectives: waits, groups, reductions, exchanges, buckets and slices of them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator

import torch
from mutation_kinds import (
    Edit,
    add_call,
    arguments,
    computes_the_same,
    forward_to,
    has_known_sizes,
    kind,
    live_nodes,
    move_after,
    replace_argument,
    same_kind,
    set_argument,
    value,
)
from torch.fx import Graph, Node

from gt_passes.analysis.aliasing import written_nodes
from gt_passes.analysis.bucket_copies import PACK_BUCKET, UNPACK_BUCKET
from gt_passes.analysis.collectives import is_collective, is_wait

aten = torch.ops.aten
functional = torch.ops._c10d_functional


# Collectives.


def _waits(graph: Graph) -> list[Node]:
    return [node for node in live_nodes(graph) if is_wait(node)]


def _launches(graph: Graph, *names: str) -> list[Node]:
    found = [node for node in live_nodes(graph) if is_collective(node)]
    return [n for n in found if not names or str(n.target).split(".")[1] in names]


def _wait_of(launch: Node) -> Node:
    return next(user for user in launch.users if is_wait(user))


@kind
def dropped_wait(graph: Graph) -> Iterator[tuple[str, Edit]]:
    for wait in _waits(graph):
        yield wait.name, forward_to(wait.name, wait.args[0].name)


@kind
def wait_after_first_reader(graph: Graph) -> Iterator[tuple[str, Edit]]:
    for wait in _waits(graph):
        reader = next(iter(wait.users))
        if reader.op != "output":
            yield wait.name, move_after(wait.name, reader.name)


@kind
def read_before_wait(graph: Graph) -> Iterator[tuple[str, Edit]]:
    for wait in _waits(graph):
        reader = next(iter(wait.users))
        for index in arguments(reader)[:1]:
            if reader.args[index] is wait and reader.op != "output":
                yield reader.name, replace_argument(reader.name, index, wait.args[0].name)


@kind
def wrong_group(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """Another group with as many ranks, or one that is not there."""
    for launch in _launches(graph):
        index = len(launch.args) - 1
        group = launch.args[index]
        others = {other.args[-1] for other in _launches(graph)} - {group}
        yield launch.name, set_argument(launch.name, index, min(others, default="other"))


@kind
def wrong_reduction(graph: Graph) -> Iterator[tuple[str, Edit]]:
    for launch in _launches(graph, "all_reduce", "reduce_scatter_tensor"):
        yield launch.name, set_argument(launch.name, 1, "max")
        yield f"{launch.name} averages", set_argument(launch.name, 1, "avg")


@kind
def duplicated_reduction(graph: Graph) -> Iterator[tuple[str, Edit]]:
    for launch in _launches(graph, "all_reduce", "reduce_scatter_tensor"):
        wait = _wait_of(launch).name

        def edit(graph, nodes, wait=wait, group=launch.args[-1]):
            reduced = nodes[wait]
            with graph.inserting_after(reduced):
                again = add_call(graph, functional.all_reduce.default, (reduced, "sum", group))
            with graph.inserting_after(again):
                waited = add_call(graph, functional.wait_tensor.default, (again,))
            reduced.replace_all_uses_with(waited, delete_user_cb=lambda user: user is not again)

        yield launch.name, edit


@kind
def dropped_reduction(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """The result is this rank's own part, not reduced. All shapes are right."""
    for launch in _launches(graph, "all_reduce", "reduce_scatter_tensor"):
        wait, source = _wait_of(launch), launch.args[0]

        def edit(graph, nodes, wait=wait.name, launch=launch.name, source=source.name):
            result, size = (
                nodes[source],
                value(nodes[wait]).shape[0] if value(nodes[wait]).dim() else 0,
            )
            if value(nodes[source]).shape != value(nodes[wait]).shape:
                with graph.inserting_before(nodes[wait]):
                    result = add_call(graph, aten.slice.Tensor, (result, 0, 0, size))
            nodes[wait].replace_all_uses_with(result)
            graph.erase_node(nodes[wait])
            graph.erase_node(nodes[launch])

        yield launch.name, edit


@kind
def reduced_in_lower_precision(graph: Graph) -> Iterator[tuple[str, Edit]]:
    for launch in _launches(graph, "all_reduce", "reduce_scatter_tensor"):
        if value(launch).dtype is not torch.float32:
            continue

        wait = _wait_of(launch).name

        def edit(graph, nodes, launch=launch.name, wait=wait):
            source = nodes[launch].args[0]
            with graph.inserting_before(nodes[launch]):
                low = add_call(graph, aten._to_copy.default, (source,), dtype=torch.bfloat16)
            nodes[launch].update_arg(0, low)
            for name in (launch, wait):
                nodes[name].meta["val"] = value(nodes[name]).to(torch.bfloat16)
            with graph.inserting_after(nodes[wait]):
                back = add_call(graph, aten._to_copy.default, (nodes[wait],), dtype=torch.float32)
            nodes[wait].replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)

        yield launch.name, edit


@kind
def gathered_the_wrong_shard(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """A collective of another value of the same shape."""
    launches = _launches(graph)
    for launch in launches:
        for other in launches:
            if other is launch or other.target is not launch.target:
                continue
            mine, theirs = launch.args[0], other.args[0]
            if not isinstance(mine, Node) or not theirs < launch:
                continue
            if same_kind(mine, theirs) and not computes_the_same(mine, theirs):
                yield launch.name, replace_argument(launch.name, 0, theirs.name)
                break


@kind
def dropped_collective(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """An exchange between ranks does not happen, where as much comes in as goes out."""
    for launch in _launches(graph, "all_to_all_single"):
        if has_known_sizes(launch) and same_kind(launch, launch.args[0]):
            yield launch.name, forward_to(_wait_of(launch).name, launch.args[0].name)


@kind
def wrong_exchange_sizes(graph: Graph) -> Iterator[tuple[str, Edit]]:
    for launch in _launches(graph, "all_to_all_single"):
        for index in (1, 2):
            sizes = list(launch.args[index])
            distinct = {item.name if isinstance(item, Node) else item for item in sizes}
            if len(distinct) > 1:

                def edit(graph, nodes, name=launch.name, index=index):
                    nodes[name].update_arg(index, list(nodes[name].args[index])[::-1])

                yield f"{launch.name} reversed", edit
            if all(type(size) is int for size in sizes) and sizes[0] > 0:
                changed = [sizes[0] - 1, sizes[1] + 1, *sizes[2:]]
                yield f"{launch.name} uneven", set_argument(launch.name, index, changed)


@kind
def swapped_collectives_on_one_rank(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """Two collectives of one group in the other order, as only this rank has them."""
    launches = _launches(graph)
    for first, second in itertools.pairwise(launches):
        if first.args[-1] == second.args[-1] and _can_move(second, first):

            def edit(graph, nodes, first=first.name, second=second.name):
                place = nodes[first]
                for node in reversed(_needed_between(nodes[second], place)):
                    place.prepend(node)
                    place = node

            yield f"{second.name} before {first.name}", edit


def _needed_between(node: Node, place: Node) -> list[Node]:
    """A node and what it needs of what stands after a place, in execution order."""
    needed: dict[Node, None] = {}
    pending = [node]
    while pending:
        current = pending.pop()
        if current not in needed and place < current:
            needed[current] = None
            pending += current.all_input_nodes
    return sorted(needed)


def _can_move(node: Node, place: Node) -> bool:
    """Whether a node and what it needs can stand before a place: nothing there needs the place."""
    moved = _needed_between(node, place)
    if any(is_wait(other) or any(True for _ in written_nodes(other)) for other in moved):
        return False
    return not any(place in other.all_input_nodes for other in moved)


# Buckets, slices and views.


@kind
def wrong_part_of_a_bucket(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """Another part of equal size."""
    for item in live_nodes(graph):
        if item.target is not operator.getitem or not isinstance(value(item), torch.Tensor):
            continue
        parts = value(item.args[0])
        for index in range(len(parts)):
            if index == item.args[1] or not isinstance(parts[index], torch.Tensor):
                continue
            if parts[index].shape == value(item).shape:

                def edit(graph, nodes, name=item.name, index=index):
                    item = nodes[name]
                    item.update_arg(1, index)
                    item.meta["val"] = value(item.args[0])[index]

                yield item.name, edit
                break


@kind
def swapped_parts_of_a_bucket(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """Two equal-shaped tensors change places in a bucket, and are read as before."""
    for cat in live_nodes(graph):
        if cat.target not in (aten.cat.default, PACK_BUCKET):
            continue
        parts = cat.args[0]
        for index in range(len(parts) - 1):
            first, second = parts[index : index + 2]
            if same_kind(first, second) and not computes_the_same(first, second):

                def edit(graph, nodes, name=cat.name, index=index):
                    parts = list(nodes[name].args[0])
                    parts[index], parts[index + 1] = parts[index + 1], parts[index]
                    nodes[name].update_arg(0, parts)

                yield cat.name, edit


@kind
def members_of_a_bucket_in_another_order(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """Two equal-shaped parameters change places in the bucket of this rank, and where it is read."""
    for cat in live_nodes(graph):
        if cat.target is not PACK_BUCKET:
            continue
        parts, read = cat.args[0], _items_of_the_bucket(cat)
        for index in range(len(parts) - 1):
            first, second = parts[index : index + 2]
            if not same_kind(first, second) or computes_the_same(first, second):
                continue
            if {index, index + 1} <= read.keys():
                names = (read[index], read[index + 1])

                def edit(graph, nodes, name=cat.name, index=index, names=names):
                    parts = list(nodes[name].args[0])
                    parts[index], parts[index + 1] = parts[index + 1], parts[index]
                    nodes[name].update_arg(0, parts)
                    nodes[names[0]].update_arg(1, index + 1)
                    nodes[names[1]].update_arg(1, index)

                yield f"{cat.name} members {index} and {index + 1}", edit
                break


def _items_of_the_bucket(cat: Node) -> dict[int, str]:
    """The nodes that take members out of what became of a bucket, by position."""
    (launch,) = cat.users
    (unpacked,) = _wait_of(launch).users
    return {item.args[1]: item.name for item in unpacked.users}


@kind
def packed_in_another_dtype(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """A bucket is exchanged in a dtype that loses bits, and what comes back is cast."""
    for packed in live_nodes(graph):
        if packed.target is not PACK_BUCKET:
            continue
        (launch,) = packed.users
        wait, dtype = _wait_of(launch).name, value(packed).dtype
        other = torch.float16 if dtype is torch.bfloat16 else torch.bfloat16

        def edit(
            graph,
            nodes,
            names=(packed.name, launch.name, wait),
            wait=wait,
            dtype=dtype,
            other=other,
        ):
            nodes[names[0]].update_arg(2, other)
            for name in names:
                nodes[name].meta["val"] = value(nodes[name]).to(other)
            with graph.inserting_after(nodes[wait]):
                back = add_call(graph, aten._to_copy.default, (nodes[wait],), dtype=dtype)
            nodes[wait].replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)

        yield packed.name, edit


@kind
def rows_of_a_bucket(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """Another number of rows: as many elements of each member, in other places."""
    for node in live_nodes(graph):
        if node.target is PACK_BUCKET and len(node.args[0]) > 1:
            numels = [value(member).numel() for member in node.args[0]]
            rows = 1 if node.args[1] > 1 else 2
            if all(numel % rows == 0 for numel in numels):
                yield node.name, set_argument(node.name, 1, rows)
        elif node.target is UNPACK_BUCKET and len(node.args[2]) > 1 and node.args[1] > 1:

            def edit(graph, nodes, name=node.name):
                bucket, rows, sizes = nodes[name].args
                nodes[name].args = (bucket, 1, [rows * size for size in sizes])

            yield node.name, edit


@kind
def wrong_split_sizes(graph: Graph) -> Iterator[tuple[str, Edit]]:
    for split in live_nodes(graph):
        if split.target is aten.split_with_sizes.default:
            sizes = list(split.args[1])
            if len(set(sizes)) > 1:
                yield split.name, set_argument(split.name, 1, sizes[::-1])
            if sizes[0] > 1 and len(sizes) > 1:
                changed = [sizes[0] - 1, sizes[1] + 1, *sizes[2:]]
                yield f"{split.name} by one", set_argument(split.name, 1, changed)
        elif split.target is UNPACK_BUCKET and len(set(split.args[2])) > 1:
            yield split.name, set_argument(split.name, 2, split.args[2][::-1])
        elif split.target is aten.split.Tensor and split.args[1] > 1:
            yield split.name, set_argument(split.name, 1, split.args[1] - 1)


@kind
def shifted_slice(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """As long as before, and elsewhere."""
    for node in live_nodes(graph):
        if node.target is aten.slice.Tensor and len(node.args) >= 4:
            source, dim, start, end = node.args[:4]
            size = value(source).shape[dim]
            stop = min(end, size)
            if start > 0:
                shift = -1
            elif stop < size:
                shift = 1
            else:
                continue

            def edit(graph, nodes, name=node.name, bounds=(start + shift, stop + shift)):
                node = nodes[name]
                node.update_arg(2, bounds[0])
                node.update_arg(3, bounds[1])
                with value(node).fake_mode:
                    node.meta["val"] = node.target(value(node.args[0]), *node.args[1:])

            yield node.name, edit


@kind
def transposed(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """A square matrix is transposed, or is not any more."""
    for node in live_nodes(graph):
        if node.target is not aten.mm.default:
            continue
        for index in arguments(node):
            source = node.args[index]
            if has_known_sizes(source) and value(source).shape[0] == value(source).shape[1]:

                def edit(graph, nodes, name=node.name, index=index):
                    node = nodes[name]
                    with graph.inserting_before(node):
                        turned = add_call(graph, aten.t.default, (node.args[index],))
                    node.update_arg(index, turned)

                yield f"{node.name} argument {index}", edit


@kind
def reshaped_in_another_order(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """``view`` where the dims had to be swapped first: same shape and strides, other elements."""
    for node in live_nodes(graph):
        if node.target is not aten.transpose.int or not has_known_sizes(node):
            continue
        if min(value(node).shape) > 1 and value(node.args[0]).is_contiguous():

            def edit(graph, nodes, name=node.name):
                node = nodes[name]
                source, first, second = node.args
                with graph.inserting_before(node):
                    shape = list(value(node).shape)
                    other = add_call(graph, aten.view.default, (source, shape))
                    turned = add_call(graph, aten.transpose.int, (other, first, second))
                    dense = add_call(
                        graph, aten.clone.default, (turned,), memory_format=torch.contiguous_format
                    )
                    result = add_call(graph, aten.transpose.int, (dense, first, second))
                node.replace_all_uses_with(result)
                graph.erase_node(node)

            yield node.name, edit
