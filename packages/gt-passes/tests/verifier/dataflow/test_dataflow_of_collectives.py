"""Which changes of collectives keep the dataflow of a graph: buckets, other groups, other parts."""

from __future__ import annotations

import pytest
import torch
from pass_graphs import collectives
from program_pairs import (
    RANKS,
    V,
    X,
    Y,
    bucketed_gather,
    bucketed_scatter,
    gather,
    reduce,
    same,
    scatter,
)


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
