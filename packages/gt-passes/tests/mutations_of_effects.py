"""Bugs in what has an order: writes, random draws, unknown operators."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from mutation_kinds import (
    Edit,
    kind,
    live_nodes,
    move_after,
    move_before,
    replace_argument,
    same_kind,
)
from torch.fx import Graph, Node

from gt_passes.analysis.aliasing import AliasClasses, written_nodes
from gt_passes.analysis.collectives import is_pure_collective
from gt_passes.analysis.operator_effects import draws_random_numbers, is_barrier, is_only_a_view

aten = torch.ops.aten
functional = torch.ops._c10d_functional


# Memory.


def _writers(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if any(True for _ in written_nodes(node))]


@kind
def dropped_write(graph: Graph) -> Iterator[tuple[str, Edit]]:
    for writer in _writers(graph):
        (written,) = written_nodes(writer)

        def edit(graph, nodes, name=writer.name, written=written.name):
            nodes[name].replace_all_uses_with(nodes[written])
            graph.erase_node(nodes[name])

        yield writer.name, edit


@kind
def doubled_write(graph: Graph) -> Iterator[tuple[str, Edit]]:
    for writer in _writers(graph):
        if draws_random_numbers(writer):
            continue  # a kind of its own
        if writer.target is aten.copy_.default:
            continue  # the same elements once more: nothing is wrong

        def edit(graph, nodes, name=writer.name):
            writer = nodes[name]
            with graph.inserting_after(writer):
                again = graph.node_copy(writer, lambda node: node)
                again.meta = dict(writer.meta)

        yield writer.name, edit


@kind
def write_became_a_copy(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """Out of place: readers of the result see it, the buffer does not change."""
    out_of_place = {aten.add_.Tensor: aten.add.Tensor, aten.mul_.Tensor: aten.mul.Tensor}
    for writer in _writers(graph):
        if writer.target in out_of_place:

            def edit(graph, nodes, name=writer.name, target=out_of_place[writer.target]):
                nodes[name].target = target

            yield writer.name, edit


@kind
def use_after_overwrite(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """A reader of the old value runs after the write; or the write before it."""
    aliases = AliasClasses(graph)
    for writer in _writers(graph):
        (written,) = written_nodes(writer)
        memory = aliases.class_of(written)
        for reader in _readers(graph, aliases, memory):
            if reader in writer.all_input_nodes:
                continue
            if reader < writer and not any(user < writer for user in reader.users):
                yield f"{reader.name} after {writer.name}", move_after(reader.name, writer.name)
        for reader in _readers(graph, aliases, memory):
            if reader < writer and all(source < reader for source in writer.all_input_nodes):
                yield f"{writer.name} before {reader.name}", move_before(writer.name, reader.name)


@kind
def moved_across_a_write(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """A reader of the new value runs before the write."""
    aliases = AliasClasses(graph)
    for writer in _writers(graph):
        (written,) = written_nodes(writer)
        for reader in _readers(graph, aliases, aliases.class_of(written)):
            if not writer < reader or writer in reader.all_input_nodes:
                continue
            if all(source < writer for source in reader.all_input_nodes):
                yield f"{reader.name} before {writer.name}", move_before(reader.name, writer.name)


def _readers(graph: Graph, aliases: AliasClasses, memory: Node) -> list[Node]:
    return [
        node
        for node in live_nodes(graph)
        if not is_only_a_view(node)
        and not any(True for _ in written_nodes(node))
        and any(aliases.class_of(source) is memory for source in node.all_input_nodes)
    ]


@kind
def swapped_writes(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """Two writes to one memory in the other order."""
    aliases = AliasClasses(graph)
    writers = _writers(graph)
    for first, second in itertools.pairwise(writers):
        (mine,), (theirs,) = written_nodes(first), written_nodes(second)
        if aliases.class_of(mine) is not aliases.class_of(theirs):
            continue
        if first.target is second.target and first.args[1:] == second.args[1:]:
            continue  # the same write twice

        def edit(graph, nodes, first=first.name, second=second.name):
            early, late = nodes[first], nodes[second]
            written = early.args[0]
            early.prepend(late)
            late.update_arg(0, written)
            for item in late.args[1:]:
                if isinstance(item, Node) and late < item:
                    late.prepend(item)

        yield f"{second.name} before {first.name}", edit


@kind
def written_to_another_buffer(graph: Graph) -> Iterator[tuple[str, Edit]]:
    placeholders = graph.find_nodes(op="placeholder")
    for writer in _writers(graph):
        (written,) = written_nodes(writer)
        for other in placeholders:
            if written.op == "placeholder" and other is not written and same_kind(other, written):
                yield writer.name, replace_argument(writer.name, 0, other.name)
                break


# Random numbers and unknown operators.


def _draws(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if draws_random_numbers(node)]


@kind
def duplicated_draw(graph: Graph) -> Iterator[tuple[str, Edit]]:
    for draw in _draws(graph):

        def edit(graph, nodes, name=draw.name):
            draw = nodes[name]
            with graph.inserting_before(draw):
                again = graph.node_copy(draw, lambda node: node)
                again.meta = dict(draw.meta)

        yield draw.name, edit


@kind
def reordered_draws(graph: Graph) -> Iterator[tuple[str, Edit]]:
    draws = _draws(graph)
    for first, second in itertools.pairwise(draws):
        if all(source < first for source in second.all_input_nodes):
            yield f"{second.name} before {first.name}", move_before(second.name, first.name)


@kind
def shared_draw(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """Two draws became one, as if they were equal expressions."""
    draws = _draws(graph)
    for index, first in enumerate(draws):
        for second in draws[index + 1 :]:
            if first.target is second.target and same_kind(first, second):

                def edit(graph, nodes, first=first.name, second=second.name):
                    nodes[second].replace_all_uses_with(nodes[first])
                    graph.erase_node(nodes[second])

                yield f"{second.name} is {first.name}", edit
                break


def _barriers(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function" and is_barrier(node)]


@kind
def moved_across_a_barrier(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """A collective, a draw or a write on the other side of an unknown operator."""
    moved = [
        node
        for node in live_nodes(graph)
        if is_pure_collective(node)
        or draws_random_numbers(node)
        or any(True for _ in written_nodes(node))
    ]
    for barrier in _barriers(graph):
        for node in moved:
            if node in barrier.all_input_nodes:
                continue
            if node < barrier and all(barrier < user for user in node.users):
                yield f"{node.name} after {barrier.name}", move_after(node.name, barrier.name)
            if barrier < node and all(source < barrier for source in node.all_input_nodes):
                yield f"{node.name} before {barrier.name}", move_before(node.name, barrier.name)


@kind
def dropped_barrier(graph: Graph) -> Iterator[tuple[str, Edit]]:
    for barrier in _barriers(graph):
        source = barrier.all_input_nodes[0]
        if same_kind(source, barrier):

            def edit(graph, nodes, name=barrier.name, source=source.name):
                nodes[name].replace_all_uses_with(nodes[source])
                graph.erase_node(nodes[name])

            yield barrier.name, edit
