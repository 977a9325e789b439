"""Bugs in what is computed: recorded values, operators, operands, outputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from mutation_kinds import (
    Edit,
    add_call,
    arguments,
    computes_the_same,
    forward_to,
    has_known_sizes,
    is_float,
    kind,
    live_nodes,
    record,
    replace_argument,
    same_kind,
    set_argument,
    value,
)
from torch.fx import Graph, Node

from gt_passes.analysis.aliasing import written_nodes
from gt_passes.analysis.collectives import is_collective, is_wait
from gt_passes.analysis.operator_effects import draws_random_numbers, is_only_a_view

aten = torch.ops.aten
functional = torch.ops._c10d_functional


# Recorded values.


def _recorded_tensors(graph: Graph) -> list[Node]:
    return [
        node
        for node in live_nodes(graph)
        if isinstance(value(node), torch.Tensor) and has_known_sizes(node)
    ]


@kind
def stale_shape(graph: Graph) -> Iterator[tuple[str, Edit]]:
    for node in _recorded_tensors(graph):
        if value(node).dim() and value(node).shape[0] > 0:
            yield node.name, record(node.name, lambda old: torch.cat([old, old]))


def _transposed_memory(old: torch.Tensor) -> torch.Tensor:
    return old.t().contiguous().t()


@kind
def stale_stride(graph: Graph) -> Iterator[tuple[str, Edit]]:
    for node in _recorded_tensors(graph):
        if value(node).dim() == 2 and min(value(node).shape) > 1:
            turned = value(node).is_contiguous()
            yield (
                node.name,
                record(node.name, _transposed_memory if turned else torch.Tensor.contiguous),
            )


@kind
def stale_dtype(graph: Graph) -> Iterator[tuple[str, Edit]]:
    for node in _recorded_tensors(graph):
        if value(node).dtype is not torch.float64:
            yield node.name, record(node.name, lambda old: old.to(torch.float64))


# Operators and operands.

_COMMUTATIVE = frozenset(
    {aten.add.Tensor, aten.mul.Tensor, aten.add_.Tensor, aten.eq.Tensor, aten.logical_and.default}
)


@kind
def swapped_operands(graph: Graph) -> Iterator[tuple[str, Edit]]:
    for node in live_nodes(graph):
        places = arguments(node)
        if node.target in _COMMUTATIVE or len(places) < 2 or places[:2] != [0, 1]:
            continue
        first, second = node.args[:2]
        if not (is_float(first) and is_float(second)) or computes_the_same(first, second):
            continue
        if same_kind(first, second):

            def edit(graph, nodes, name=node.name):
                node = nodes[name]
                node.args = (node.args[1], node.args[0], *node.args[2:])

            yield node.name, edit


@kind
def wrong_operand(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """Another value of the same shape, made earlier."""
    made: list[Node] = []
    for node in live_nodes(graph):
        for index in arguments(node)[:1]:
            mine = node.args[index]
            for other in reversed(made[-40:]):
                if not is_float(mine) or not same_kind(mine, other) or is_collective(other):
                    continue
                if not computes_the_same(mine, other):
                    yield (
                        f"{node.name} reads {other.name}",
                        replace_argument(node.name, index, other.name),
                    )
                    break
        made.append(node)


@kind
def wrong_parameter(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """An equal-shaped parameter in place of the right one."""
    placeholders = graph.find_nodes(op="placeholder")
    for node in live_nodes(graph):
        for index in arguments(node)[:1]:
            mine = node.args[index]
            if mine.op != "placeholder":
                continue
            for other in placeholders:
                if other is not mine and same_kind(other, mine):
                    yield (
                        f"{node.name} reads {other.name}",
                        replace_argument(node.name, index, other.name),
                    )
                    break


@kind
def wrong_constant(graph: Graph) -> Iterator[tuple[str, Edit]]:
    for node in live_nodes(graph):
        for index, item in enumerate(node.args):
            if type(item) is float:
                yield f"{node.name} argument {index}", set_argument(node.name, index, item * 2 + 1)


@kind
def wrong_dim(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """A reduction along another dim of equal extent."""
    reductions = (aten._softmax.default, aten.sum.dim_IntList, aten.mean.dim)
    for node in live_nodes(graph):
        if node.target not in reductions:
            continue
        dims = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
        shape = value(node.args[0]).shape
        dim = dims[-1] % len(shape)
        others = [d for d in range(len(shape)) if d != dim and shape[d] == shape[dim] > 1]
        if others and len(dims) == 1:
            wrong = [others[0]] if isinstance(node.args[1], (list, tuple)) else others[0]
            yield node.name, set_argument(node.name, 1, wrong)


@kind
def dropped_operator(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """What an operator gives is what it took: an activation, a scaling, an addition left out."""
    for node in live_nodes(graph):
        if is_only_a_view(node) or is_wait(node) or is_collective(node) or not node.args:
            continue
        source = node.args[0]
        if node.target in (aten.clone.default, aten._to_copy.default):
            continue  # the same elements
        if any(True for _ in written_nodes(node)) or draws_random_numbers(node):
            continue  # kinds of their own
        if is_float(node) and is_float(source) and same_kind(source, node):
            yield node.name, forward_to(node.name, source.name)


@kind
def dropped_cast(graph: Graph) -> Iterator[tuple[str, Edit]]:
    for node in live_nodes(graph):
        if node.target is not aten._to_copy.default or not is_float(node):
            continue
        if value(node).dtype is not value(node.args[0]).dtype:
            yield node.name, forward_to(node.name, node.args[0].name)


@kind
def extra_rounding(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """A value goes through a shorter dtype and back."""
    for node in live_nodes(graph):
        if not is_float(node) or value(node).dtype is not torch.float32 or is_collective(node):
            continue
        if not has_known_sizes(node) or not value(node).is_contiguous():
            continue
        if any(True for _ in written_nodes(node)):
            continue

        def edit(graph, nodes, name=node.name):
            node = nodes[name]
            with graph.inserting_after(node):
                low = add_call(graph, aten._to_copy.default, (node,), dtype=torch.bfloat16)
            with graph.inserting_after(low):
                back = add_call(graph, aten._to_copy.default, (low,), dtype=torch.float32)
            node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not low)

        yield node.name, edit


@kind
def double_counted_accumulation(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """A gradient is added once more."""
    for node in live_nodes(graph):
        if node.target is not aten.add.Tensor or len(arguments(node)) != 2:
            continue
        if same_kind(node.args[0], node.args[1]) and node.meta.get("autograd_backward"):

            def edit(graph, nodes, name=node.name):
                node = nodes[name]
                with graph.inserting_after(node):
                    again = add_call(graph, aten.add.Tensor, (node, node.args[1]))
                node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)

            yield node.name, edit


@kind
def dropped_accumulation(graph: Graph) -> Iterator[tuple[str, Edit]]:
    for node in live_nodes(graph):
        if node.target is aten.add.Tensor and len(arguments(node)) == 2:
            for index in (0, 1):
                if same_kind(node.args[index], node):
                    yield (
                        f"{node.name} argument {index}",
                        forward_to(node.name, node.args[index].name),
                    )


@kind
def reshaped_back_from_a_transpose(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """Rows of tokens, as many as data decide, transposed and reshaped as they were: a copy."""
    for node in live_nodes(graph):
        if not is_float(node) or has_known_sizes(node) or value(node).dim() != 2:
            continue
        if is_collective(node) or type(value(node).shape[1]) is not int:
            continue

        def edit(graph, nodes, name=node.name):
            node = nodes[name]
            with graph.inserting_after(node):
                rows = add_call(graph, aten.sym_size.int, (node, 0))
            with graph.inserting_after(rows):
                turned = add_call(graph, aten.t.default, (node,))
            with graph.inserting_after(turned):
                back = graph.call_function(
                    aten.reshape.default, (turned, [rows, value(node).shape[1]])
                )
            with value(node).fake_mode:
                back.meta["val"] = torch.empty_like(value(node).contiguous())
            added = (rows, turned, back)
            node.replace_all_uses_with(back, delete_user_cb=lambda user: user not in added)

        yield node.name, edit


@kind
def laid_out_otherwise_under_as_strided(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """The same elements in other places, of which ``as_strided`` reads by place."""
    for node in live_nodes(graph):
        if node.target is not aten.as_strided.default:
            continue

        def edit(graph, nodes, name=node.name):
            node = nodes[name]
            source = node.args[0]
            last = value(source).dim() - 1
            with graph.inserting_before(node):
                turned = add_call(graph, aten.transpose.int, (source, last - 1, last))
                copied = add_call(
                    graph, aten.clone.default, (turned,), memory_format=torch.contiguous_format
                )
                back = add_call(graph, aten.transpose.int, (copied, last - 1, last))
            node.update_arg(0, back)

        yield node.name, edit


# Outputs.


def _outputs(graph: Graph) -> tuple[Node, list[Node]]:
    (output,) = graph.find_nodes(op="output")
    return output, list(output.args[0])


def _set_outputs(changes: dict[int, int]) -> Edit:
    def edit(graph: Graph, nodes: dict[str, Node]) -> None:
        output, results = _outputs(graph)
        output.args = (tuple(results[changes.get(index, index)] for index in range(len(results))),)

    return edit


@kind
def swapped_outputs(graph: Graph) -> Iterator[tuple[str, Edit]]:
    _, results = _outputs(graph)
    for first in range(len(results)):
        for second in range(first + 1, len(results)):
            if same_kind(results[first], results[second]):
                changes = {first: second, second: first}
                yield f"outputs {first} and {second}", _set_outputs(changes)
                break


@kind
def gradient_of_another_parameter(graph: Graph) -> Iterator[tuple[str, Edit]]:
    _, results = _outputs(graph)
    for first in range(len(results)):
        for second in reversed(range(len(results))):
            if first != second and same_kind(results[first], results[second]):
                yield f"output {first} is output {second}", _set_outputs({first: second})
                break
