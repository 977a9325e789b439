"""Which changes of a graph keep its dataflow: pairs of programs that are the same, or are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from expecttest import assert_expected_inline
from pass_graphs import capture, collectives

from gt_passes.graph_problem import GraphProblem
from gt_passes.verifier.dataflow.check_dataflow import Dataflow
from gt_passes.verifier.dataflow.value_table import ValueTable

aten = torch.ops.aten
RANKS = 4
X = torch.ones(8, 4)
Y = torch.ones(8, 4)
V = torch.ones(1)


def differences(
    before: Callable[..., object],
    after: Callable[..., object],
    *args: torch.Tensor,
    same_groups: Mapping[str, str] | None = None,
) -> list[GraphProblem]:
    """What the dataflow check says of two functions with the same names of arguments."""
    table = ValueTable()
    first, second = (
        Dataflow.of(capture(program, *args), table=table, same_groups=same_groups or {})
        for program in (before, after)
    )
    return list(first.find_differences(second))


def same(before, after, *args, **options) -> bool:
    return not differences(before, after, *args, **options)


def gather(x, group="fsdp"):
    return collectives.wait_tensor(collectives.all_gather_into_tensor(x, RANKS, group))


def scatter(x, group="fsdp", reduction="sum"):
    return collectives.wait_tensor(collectives.reduce_scatter_tensor(x, reduction, RANKS, group))


def reduce(x, group="dp", reduction="sum"):
    return collectives.wait_tensor(collectives.all_reduce(x, reduction, group))


def bucketed_gather(tensors, group="fsdp"):
    bucket = torch.cat([x.reshape(-1) for x in tensors])
    rows = gather(bucket, group).view(RANKS, -1)
    parts = rows.split([x.numel() for x in tensors], dim=1)
    return [
        part.reshape(RANKS * x.shape[0], *x.shape[1:])
        for part, x in zip(parts, tensors, strict=True)
    ]


def bucketed_scatter(tensors, group="fsdp", reduction="sum"):
    bucket = torch.cat([x.reshape(RANKS, -1) for x in tensors], dim=1)
    reduced = scatter(bucket.reshape(-1), group, reduction)
    parts = reduced.split([x.numel() // RANKS for x in tensors])
    return [
        part.view(x.shape[0] // RANKS, *x.shape[1:]) for part, x in zip(parts, tensors, strict=True)
    ]


# Order, sharing, recomputation, views.


def test_can_reorder_what_does_not_depend_on_each_other():
    def before(x, y):
        a = x.exp()
        b = y.sin()
        return a + b

    def after(x, y):
        b = y.sin()
        a = x.exp()
        return a + b

    assert same(before, after, X, Y)


def test_can_recompute_share_and_drop_what_is_dead():
    def before(x, y):
        a = x.exp()
        return a * a, x.cos()

    def after(x, y):
        y.sin()
        return x.exp() * x.exp(), x.cos()

    assert same(before, after, X, Y)
    assert same(after, before, X, Y)


def test_can_spell_views_differently():
    def before(x, y):
        return x.t().t().view(2, 4, 4).permute(1, 0, 2).reshape(32) @ y.flatten()

    def after(x, y):
        return x.reshape(2, 4, 4).transpose(0, 1).contiguous().view(-1) @ y.view(4, 8).reshape(-1)

    assert same(before, after, X, Y)


def test_can_cut_and_join_along_any_dim():
    def before(x, y):
        return x.exp()

    def after(x, y):
        left, right = x[:, :1], x[:, 1:]
        return torch.cat([torch.cat([left, right], dim=1)[:3], x[3:]]).exp()

    assert same(before, after, X, Y)


def test_can_copy_to_another_device_and_back():
    def before(x, y):
        return x.exp() * y

    def after(x, y):
        kept = aten._to_copy.default(x.exp(), device=torch.device("cpu"))
        return torch.ops.prims.device_put.default(kept, torch.device("cpu")) * y

    assert same(before, after, X, Y)


def test_can_cast_before_cutting_or_after_it():
    def before(x, y):
        return torch.cat([x.flatten().bfloat16(), y.flatten().bfloat16()]) * 2

    def after(x, y):
        return torch.cat([x.flatten(), y.flatten()]).bfloat16() * 2

    assert same(before, after, X, Y)


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(lambda x, y: x.view(4, 8).t(), id="another-order-of-elements"),
        pytest.param(lambda x, y: y.t().reshape(8, 4), id="another-input"),
        pytest.param(lambda x, y: x.t().reshape(8, 4) * 1.5, id="another-operator"),
        pytest.param(lambda x, y: x.t().bfloat16().float().reshape(8, 4), id="rounded"),
        pytest.param(lambda x, y: x.t()[:1].expand(4, 8).reshape(8, 4), id="repeated"),
    ],
)
def test_cannot_change_elements(after):
    assert not same(lambda x, y: x.t().reshape(8, 4), after, X, Y)


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(lambda x, y: (y - x) * 2.0, id="swapped-operands"),
        pytest.param(lambda x, y: (x - y) * 2.5, id="another-constant"),
        pytest.param(lambda x, y: torch.sub(x, y, alpha=2) * 2.0, id="another-keyword"),
        pytest.param(lambda x, y: (x - y) * 2, id="another-type-of-constant"),
        pytest.param(lambda x, y: x - y, id="dropped"),
        pytest.param(lambda x, y: (x - y) * 2.0 * 2.0, id="doubled"),
    ],
)
def test_cannot_change_operators_or_their_arguments(after):
    assert not same(lambda x, y: (x - y) * 2.0, after, X, Y)


def test_cannot_swap_outputs():
    assert not same(lambda x, y: (x.exp(), y.exp()), lambda x, y: (y.exp(), x.exp()), X, Y)


# Buckets of collectives.


def test_can_bucket_all_gathers():
    def before(x, y, v):
        return gather(x) @ gather(v), gather(y)

    def after(x, y, v):
        a, b, c = bucketed_gather([x, y, v])
        return a @ c, b

    assert same(before, after, X, Y, V)


def test_can_bucket_all_gathers_that_are_cast_padded_and_sharded_on_another_dim():
    def chain(gathered):
        whole = torch.cat(gathered.chunk(RANKS, dim=0), dim=1)
        return whole.narrow(1, 0, 14)

    def before(x, y):
        padded = torch.cat([x, x.new_zeros(8, 2)], dim=1).bfloat16()
        return chain(gather(padded.contiguous())), gather(y.bfloat16())

    def after(x, y):
        padded = torch.cat([x, x.new_zeros(8, 2)], dim=1)
        a, b = bucketed_gather([padded.bfloat16(), y.bfloat16()])
        return chain(a), b

    assert same(before, after, torch.ones(8, 2), Y)


def test_can_bucket_into_a_buffer_that_is_filled_in_place():
    def before(x, y):
        return gather(x), gather(y)

    def after(x, y):
        buffer = x.new_empty(64)
        mine, theirs = buffer.split([32, 32])
        mine.copy_(x.flatten())
        theirs.copy_(y.flatten())
        gathered = x.new_empty(RANKS * 64)
        collectives.wait_tensor(
            collectives.all_gather_into_tensor_out(buffer, RANKS, "fsdp", out=gathered)
        )
        a, b = gathered.view(RANKS, 64).split([32, 32], dim=1)
        return a.reshape(32, 4), b.reshape(32, 4)

    assert same(before, after, X, Y)


def test_can_coalesce_collectives():
    def before(x, y):
        return gather(x), gather(y), reduce(x)

    def after(x, y):
        a, b = collectives.all_gather_into_tensor_coalesced([x, y], RANKS, "fsdp")
        (c,) = collectives.all_reduce_coalesced([x], "sum", "dp")
        wait = collectives.wait_tensor
        return wait(a), wait(b), wait(c)

    assert same(before, after, X, Y)


@pytest.mark.parametrize("dim", [0, 1])
def test_can_bucket_reduce_scatters(dim):
    def prepared(x):
        return torch.cat(x.chunk(RANKS, dim=dim)) if dim else x

    def before(x, y):
        return scatter(prepared(x)) / 8, scatter(prepared(y)) / 8

    def after(x, y):
        a, b = bucketed_scatter([prepared(x), prepared(y)])
        return a / 8, b / 8

    def divided_as_one(x, y):
        bucket = torch.cat([prepared(t).view(RANKS, -1) for t in (x, y)], dim=1)
        a, b = (scatter(bucket.view(-1)) / 8).split(8)
        return a.view(prepared(x).shape[0] // RANKS, -1), b.view(prepared(x).shape[0] // RANKS, -1)

    assert same(before, after, X, Y)
    assert same(before, divided_as_one, X, Y)


def test_can_bucket_all_reduces():
    def before(x, y):
        return reduce(x), reduce(y)

    def after(x, y):
        a, b = reduce(torch.cat([x.view(-1), y.view(-1)])).split([32, 32])
        return a.view(8, 4), b.view(8, 4)

    assert same(before, after, X, Y)


@pytest.mark.parametrize("exchange", [gather, reduce])
def test_cannot_exchange_the_whole_for_a_part_that_other_ranks_may_cut_elsewhere(exchange):
    """As where rank r gathers ``x[2 * r : 2 * r + 2]``: no graph says what the other ranks cut."""

    def before(x):
        return exchange(x[2:4])

    def after(x):
        whole = exchange(x)
        return whole.view(-1, 8, 4)[:, 2:4].reshape(-1, 4)

    assert not same(before, after, X)


def test_can_bucket_parts_of_one_value_that_were_exchanged_part_by_part():
    def before(x):
        left, right = x[:4], x[4:]
        return gather(left), gather(right), scatter(left), scatter(right)

    def after(x):
        parts = [x[:4], x[4:]]
        return *bucketed_gather(parts), *bucketed_scatter(parts)

    assert same(before, after, X)


def test_cannot_take_the_wrong_part_of_a_bucket():
    def after(x, y):
        return tuple(bucketed_gather([y, x]))

    def after_scatter(x, y):
        a, b = bucketed_scatter([x, y])
        return b, a

    assert not same(lambda x, y: (gather(x), gather(y)), after, X, Y)
    assert not same(lambda x, y: (scatter(x), scatter(y)), after_scatter, X, Y)


def test_cannot_mix_up_the_rows_of_ranks():
    def gathers(x, y):
        return gather(x), gather(y)

    def interleaved(x, y):
        rows = gather(torch.cat([x.view(-1), y.view(-1)]))
        a, b = rows.view(2, -1)  # as if the values of one parameter stood next to each other
        return a.view(32, 4), b.view(32, 4)

    def scatters(x, y):
        return scatter(x), scatter(y)

    def not_by_rank(x, y):
        reduced = scatter(torch.cat([x.view(-1), y.view(-1)]))
        a, b = reduced.split([8, 8])
        return a.view(2, 4), b.view(2, 4)

    assert not same(gathers, interleaved, X, Y)
    assert not same(scatters, not_by_rank, X, Y)


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(lambda x: scatter(x, group="tp"), id="another-group"),
        pytest.param(lambda x: scatter(x, reduction="avg"), id="another-reduction"),
        pytest.param(lambda x: x.view(RANKS, 2, 4).sum(0), id="dropped"),
        pytest.param(lambda x: scatter(reduce(x)), id="reduced-twice"),
        pytest.param(lambda x: scatter(x.bfloat16()).float(), id="in-another-dtype"),
    ],
)
def test_cannot_change_a_collective(after):
    assert not same(lambda x: scatter(x), after, X)


def test_can_use_another_group_only_if_it_is_known_to_be_the_same():
    def before(x):
        return gather(x, "fsdp")

    def after(x):
        return gather(x, "fsdp-second")

    assert not same(before, after, X)
    assert same(before, after, X, same_groups={"fsdp-second": "fsdp"})


# Memory that is written to.


def test_can_write_to_parts_in_any_order():
    def before(x, y):
        buffer = x.clone()
        buffer[0].copy_(y[0])
        buffer[1].mul_(2.0)
        return buffer * 2

    def after(x, y):
        buffer = x.clone()
        buffer[1].mul_(2.0)
        buffer[0].copy_(y[0])
        return buffer * 2

    assert same(before, after, X, Y)


def test_can_build_a_buffer_with_cat_or_by_copies():
    def before(x, y):
        buffer = torch.empty(16, 4)
        buffer[:8].copy_(x)
        buffer[8:].copy_(y)
        return buffer @ y.t()

    def after(x, y):
        return torch.cat([x, y]) @ y.t()

    assert same(before, after, X, Y)


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(lambda x, y: (x.exp(), x.mul_(2.0)), id="read-too-early"),
        pytest.param(lambda x, y: (x.mul(2.0).exp(), x), id="write-dropped"),
        pytest.param(lambda x, y: (x.mul_(2.0).mul_(2.0).exp(), x), id="write-doubled"),
        pytest.param(lambda x, y: (y.mul_(2.0).exp(), x), id="another-input-written"),
        pytest.param(lambda x, y: (x[:4].mul_(2.0), x.exp(), x)[1:], id="part-written"),
    ],
)
def test_cannot_change_what_is_written(after):
    def before(x, y):
        x.mul_(2.0)
        return x.exp(), x

    assert not same(before, after, X, Y)


def test_cannot_leave_something_else_in_an_input():
    def before(x, y):
        x[0].copy_(y[0])
        return y.exp()

    def after(x, y):
        x[1].copy_(y[0])
        return y.exp()

    assert not same(before, after, X, Y)


def test_cannot_move_a_write_that_goes_through_strides_across_a_read():
    def before(x, y):
        buffer = x.clone()
        first = buffer.sum()
        buffer[:, 0].copy_(y[:, 0])
        return first, buffer.sum()

    def after(x, y):
        buffer = x.clone()
        buffer[:, 0].copy_(y[:, 0])
        first = buffer.sum()
        return first, buffer.sum()

    assert same(before, before, X, Y)
    assert not same(before, after, X, Y)


# Random numbers, unknown operators, asserts.


def test_cannot_draw_in_another_order_twice_or_less():
    def before(x, y):
        return torch.rand_like(x), torch.rand_like(y).exp()

    def swapped(x, y):
        second = torch.rand_like(y).exp()
        return torch.rand_like(x), second

    def drawn_again(x, y):
        return torch.rand_like(x), torch.rand_like(y).exp(), torch.rand_like(y)

    def shared(x, y):
        drawn = torch.rand_like(x)
        return drawn, drawn.exp()

    assert same(before, before, X, Y)
    for after in (swapped, drawn_again, shared):
        assert not same(before, after, X, Y)


@torch.library.custom_op("gt_test_dataflow::log", mutates_args=())
def log(x: torch.Tensor) -> torch.Tensor:
    """An operator of which nothing is known."""
    return x.clone()


@log.register_fake
def _log(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_cannot_reorder_or_repeat_unknown_operators():
    def before(x, y):
        return log(x), log(y)

    def swapped(x, y):
        second = log(y)
        return log(x), second

    def repeated(x, y):
        log(x)
        return log(x), log(y)

    def draw_before(x, y):
        torch.rand_like(x)
        return log(x), log(y)

    assert same(before, before, X, Y)
    for after in (swapped, repeated, draw_before):
        assert not same(before, after, X, Y)


def test_an_unknown_operator_may_draw_so_that_no_draw_crosses_it():
    def before(x, y):
        return torch.rand_like(x), log(y)

    def after(x, y):
        logged = log(y)
        return torch.rand_like(x), logged

    assert not same(before, after, X, Y)


def test_an_unknown_operator_may_read_buffers_so_that_no_write_to_one_crosses_it():
    def before(x, y):
        x.add_(1.0)
        return log(y)

    def after(x, y):
        logged = log(y)
        x.add_(1.0)
        return logged

    assert same(before, before, X, Y)
    assert not same(before, after, X, Y)


def test_cannot_drop_an_assert():
    def before(x, y):
        aten._assert_async.msg(x.sum() > 0, "negative")
        return y.exp()

    assert same(before, before, X, Y)
    assert not same(before, lambda x, y: y.exp(), X, Y)


# What the errors say.


def test_errors_name_the_first_values_that_differ():
    def before(x, y):
        a = x.exp().sin()
        return a @ y.t(), a

    def after(x, y):
        a = x.exp().cos()
        return a @ y.t(), a

    def swapped(x, y):
        return y.exp().sin() @ x.t(), y.exp().sin()

    assert_expected_inline(
        "\n".join(map(str, differences(before, after, X, Y))),
        """\
[dataflow] node cos
output 0 (mm) is not computed as before
expected aten.sin.default(exp), as in node sin
got      aten.cos.default(exp), as in node cos""",
    )
    assert_expected_inline(
        "\n".join(map(str, differences(lambda x, y: x - y, lambda x, y: y - x, X, Y))),
        """\
[dataflow] node sub
output 0 (sub) is not computed as before
expected aten.sub.Tensor(x_1, y_1), as in node sub
got      aten.sub.Tensor(y_1, x_1), as in node sub""",
    )


def test_errors_name_the_part_of_a_bucket():
    def before(x, y):
        return gather(x), gather(y)

    def after(x, y):
        return tuple(bucketed_gather([y, x]))

    assert_expected_inline(
        "\n".join(map(str, differences(before, after, X, Y))),
        """\
[dataflow] node getitem
output 0 (_unsafe_view) is not computed as before
expected all_gather(4, fsdp, x_1), as in node all_gather_into_tensor
got      all_gather(4, fsdp, y_1), as in node getitem
[dataflow] node getitem_1
output 1 (_unsafe_view_1) is not computed as before
expected all_gather(4, fsdp, y_1), as in node all_gather_into_tensor_1
got      all_gather(4, fsdp, x_1), as in node getitem_1""",
    )


def test_errors_name_what_is_left_in_an_input():
    def before(x, y):
        x.add_(y)
        return y.exp()

    assert_expected_inline(
        "\n".join(map(str, differences(before, lambda x, y: y.exp(), X, Y))),
        """\
[dataflow] node x_1
what is left in input x_1 is not computed as before
expected aten.add_.Tensor(x_1, y_1) of shape [8, 4], as in node add_
got      the input x_1 of shape [8, 4], as in node x_1""",
    )
