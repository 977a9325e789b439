"""In-place operators on views that have no rule: followed as a whole, never lost, never an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pass_graphs import capture, collectives
from program_pairs import aten, differences, same

from gt_passes.verifier.dataflow.check_dataflow import Dataflow
from gt_passes.verifier.dataflow.value_table import ValueTable

X = torch.ones(6, 6)
Y = torch.ones(6, 6)
Z = torch.ones(6, 6, dtype=torch.complex64)

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(0, 2, 2),
    "as_strided": lambda x: x.as_strided((6,), (7,)),
    "movedim": lambda x: x.movedim(0, 1),
    "transpose": lambda x: x.transpose(0, 1),
    "squeeze": lambda x: x[2:3].squeeze(0),
    "squeeze_dims": lambda x: torch.squeeze(x[2:3], (0,)),
    "flip_side": lambda x: x[:, ::2],
    "view_as_complex": lambda x: torch.view_as_complex(x.view(6, 3, 2)),
    "view_dtype": lambda x: x.view(torch.int32),
    "alias": lambda x: aten.alias(x),
    "chunk": lambda x: x.chunk(2)[1],
    "unsafe_split": lambda x: torch.unsafe_split(x, 3)[1],
    "diagonal of a part": lambda x: x[:3, 3:].diagonal(1),
}


def operand(view: torch.Tensor) -> torch.Tensor:
    return torch.ones(view.shape, dtype=view.dtype)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("operator", [aten.add_.Tensor, aten.mul_.Tensor, aten.copy_.default])
def test_a_write_through_any_view_keeps_its_place(name, operator):
    view_of = VIEWS[name]

    def before(x, y):
        buffer = x.clone()
        view = view_of(buffer)
        first = buffer.sum()
        operator(view, operand(view))
        return first, buffer.sum(), view.sum(), buffer

    def write_first(x, y):
        buffer = x.clone()
        view = view_of(buffer)
        operator(view, operand(view))
        return buffer.sum(), buffer.sum(), view.sum(), buffer

    def write_left_out(x, y):
        buffer = x.clone()
        view = view_of(buffer)
        return buffer.sum(), buffer.sum(), view.sum(), buffer

    def another_buffer(x, y):
        buffer, other = x.clone(), x.clone()
        operator(view_of(other), operand(view_of(other)))
        return buffer.sum(), buffer.sum(), view_of(buffer).sum(), buffer

    assert same(before, before, X, Y)
    for after in (write_first, write_left_out, another_buffer):
        assert not same(before, after, X, Y)


@pytest.mark.parametrize("operator", [aten.add_.Tensor, aten.mul_.Tensor])
@pytest.mark.parametrize(
    "view_of", [torch.real, torch.imag, torch.view_as_real, lambda z: z.conj()]
)
def test_a_write_through_a_view_of_complex_numbers_keeps_its_place(view_of, operator):
    def before(z):
        buffer = z.clone()
        first = buffer.abs()
        operator(view_of(buffer), operand(view_of(buffer)))
        return first, buffer.abs()

    def after(z):
        buffer = z.clone()
        operator(view_of(buffer), operand(view_of(buffer)))
        return buffer.abs(), buffer.abs()

    assert same(before, before, Z)
    assert not same(before, after, Z)


def test_cannot_write_to_another_diagonal():
    def before(x, y):
        buffer = x.clone()
        buffer.diagonal(1).add_(y[0, :5])
        return buffer

    def after(x, y):
        buffer = x.clone()
        buffer.diagonal(-1).add_(y[0, :5])
        return buffer

    assert not same(before, after, X, Y)


def test_cannot_exchange_two_equal_buffers_of_which_one_is_written_through_a_view():
    def program(written):
        def run(x, y):
            buffers = torch.zeros(6, 6), torch.zeros(6, 6)
            buffers[written].diagonal().add_(y[0])
            return buffers

        return run

    assert same(program(0), program(0), X, Y)
    assert not same(program(0), program(1), X, Y)


def test_what_an_in_place_operator_returns_is_read_as_it_is_later():
    def program(is_late):
        def run(x, y):
            buffer = x.clone()
            written = buffer.diagonal().add_(y[0])
            early = written.exp()
            buffer.mul_(2.0)
            return written.exp() if is_late else early

        return run

    assert same(program(True), program(True), X, Y)
    assert not same(program(True), program(False), X, Y)


def test_what_may_be_a_copy_is_neither_surely_as_it_was_nor_surely_as_memory_is():
    def before(x):
        buffer = x.clone()
        part = buffer.view(36)
        buffer.mul_(2.0)
        return part.exp(), buffer

    def as_memory_is(x):
        buffer = x.clone()
        buffer.mul_(2.0)
        return buffer.view(36).exp(), buffer

    def as_it_was(x):
        buffer = x.clone()
        part = buffer.view(36).exp()
        buffer.mul_(2.0)
        return part, buffer

    table = ValueTable()

    def reshaped(program):
        graph_module = capture(program, X)
        for node in graph_module.graph.find_nodes(op="call_function", target=aten.view.default):
            node.target = aten.reshape.default  # which tracing would have resolved
        return Dataflow.of(graph_module, table=table)

    assert not list(reshaped(before).find_differences(reshaped(before)))
    assert list(reshaped(before).find_differences(reshaped(as_memory_is)))
    assert list(reshaped(before).find_differences(reshaped(as_it_was)))


def test_dropout_of_written_memory_draws_each_time():
    def program(is_shared):
        def run(x, y):
            buffer = x.clone()
            first = aten.native_dropout(buffer, 0.5, True)[0]
            second = first if is_shared else aten.native_dropout(buffer, 0.5, True)[0]
            result = first * second
            buffer.add_(y)
            return result, buffer

        return run

    assert same(program(False), program(False), X, Y)
    assert not same(program(False), program(True), X, Y)


@torch.library.custom_op("gt_test_views::scale_both", mutates_args=("a", "b"))
def scale_both(a: torch.Tensor, b: torch.Tensor) -> None:
    a.mul_(2.0)
    b.mul_(3.0)


@scale_both.register_fake
def _scale_both(a: torch.Tensor, b: torch.Tensor) -> None: ...


def test_cannot_exchange_equal_arguments_that_an_operator_writes():
    def program(first, second):
        def run(x, y):
            buffers = x.clone(), x.clone()
            scale_both(buffers[first].diagonal(), buffers[second].diagonal())
            return buffers

        return run

    assert same(program(0, 1), program(0, 1), X, Y)
    assert not same(program(0, 1), program(1, 0), X, Y)


def test_can_write_to_parts_of_lists_of_tensors():
    def before(x, y):
        buffer = x.clone()
        torch._foreach_add_([buffer[0], buffer.diagonal(1)], 2.0)
        return buffer, buffer.exp()

    def after(x, y):
        buffer = x.clone()
        early = buffer.exp()
        torch._foreach_add_([buffer[0], buffer.diagonal(1)], 2.0)
        return buffer, early

    assert same(before, before, X, Y)
    assert not same(before, after, X, Y)


def test_results_of_an_operator_with_several_out_arguments_are_their_memory():
    def program(is_late):
        def run(x, y):
            values, indices = torch.empty(6), torch.empty(6, dtype=torch.int64)
            found = aten.max.dim_max(x, 1, max=values, max_values=indices)
            early = found[0].exp()
            values.mul_(2.0)
            return found[0].exp() if is_late else early

        return run

    assert same(program(True), program(True), X, Y)
    assert not same(program(True), program(False), X, Y)


def test_a_collective_in_place_through_a_view_without_a_rule_is_followed():
    def before(x, y):
        buffer = x.clone()
        reduced = collectives.wait_tensor(collectives.all_reduce_(buffer.diagonal(), "sum", "dp"))
        reduced.add_(y[0])
        return buffer

    def after(x, y):
        buffer = x.clone()
        buffer.diagonal().add_(y[0])
        collectives.wait_tensor(collectives.all_reduce_(buffer.diagonal(), "sum", "dp"))
        return buffer

    assert same(before, before, X, Y)
    assert differences(before, after, X, Y)


def test_narrow_from_the_end_is_a_slice():
    def narrowed(graph_module, start):
        for node in graph_module.graph.find_nodes(op="call_function", target=aten.slice.Tensor):
            node.target, node.args = aten.narrow.default, (node.args[0], 0, start, 2)
        return Dataflow.of(graph_module, table=table)

    table = ValueTable()
    before = Dataflow.of(capture(lambda x: x[3:5].exp(), X), table=table)
    assert not list(before.find_differences(narrowed(capture(lambda x: x[3:5].exp(), X), -3)))
    assert not list(before.find_differences(narrowed(capture(lambda x: x[3:5].exp(), X), 3)))
    assert list(before.find_differences(narrowed(capture(lambda x: x[3:5].exp(), X), -4)))
    assert list(before.find_differences(narrowed(capture(lambda x: x[3:5].exp(), X), -2)))


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 4)])
def test_can_join_along_any_dim_by_copies_into_parts(dim, shape):
    a, b = torch.ones(shape), torch.ones(shape)

    def joined(a, b):
        return torch.cat([a, b], dim).exp()

    def copied(order):
        def run(a, b):
            size = list(shape)
            size[dim] *= 2
            buffer = torch.empty(size)
            parts = buffer.narrow(dim, 0, shape[dim]), buffer.narrow(dim, shape[dim], shape[dim])
            for part, source in zip(parts, (a, b) if order else (b, a), strict=True):
                part.copy_(source)
            return buffer.exp()

        return run

    assert same(joined, copied(True), a, b)
    assert not same(joined, copied(False), a, b)


def test_a_written_constant_that_is_read_by_several_nodes_is_one_memory():
    constant = torch.ones(6, 6)
    part = constant[0]

    def program(*, is_late, reads_part=False):
        def run(x):
            early = (part if reads_part else constant).exp()
            constant.add_(x)
            late = (part if reads_part else constant).exp()
            return late if is_late else early

        return capture(run, X)

    table = ValueTable()

    def dataflow(graph_module):
        return Dataflow.of(graph_module, table=table)

    late = dataflow(program(is_late=True))
    assert list(late.find_differences(dataflow(program(is_late=False))))
    with_one_node = program(is_late=True)
    first, *others = with_one_node.graph.find_nodes(op="get_attr")
    assert others
    for node in others:
        node.replace_all_uses_with(first)
    assert not list(late.find_differences(dataflow(with_one_node)))
    late_part = dataflow(program(is_late=True, reads_part=True))
    assert not list(late_part.find_differences(dataflow(program(is_late=True, reads_part=True))))
    early_part = dataflow(program(is_late=False, reads_part=True))
    assert list(late_part.find_differences(early_part))
