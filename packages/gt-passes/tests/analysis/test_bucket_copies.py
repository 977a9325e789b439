"""The copies into a bucket and out of it: exact, functional, and known to everybody who looks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pass_graphs import capture
from torch.fx import Node

from gt_passes.analysis import bucket_copies
from gt_passes.analysis.aliasing import shared_nodes, written_nodes
from gt_passes.analysis.bucket_copies import PACK_BUCKET, UNPACK_BUCKET
from gt_passes.analysis.operator_effects import draws_random_numbers, is_barrier
from gt_passes.simulation import SymbolSizes
from gt_passes.simulation.work import work_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BF16, F32 = torch.bfloat16, torch.float32


def members(shapes, dtypes):
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


def packed_by_hand(tensors, num_rows, dtype):
    rows = [tensor.to(dtype).view(num_rows, tensor.numel() // num_rows) for tensor in tensors]
    return torch.cat(rows, 1).view(-1)


def unpacked_by_hand(bucket, num_rows, sizes):
    rows = bucket.view(num_rows, bucket.numel() // num_rows)
    return [piece.contiguous().view(-1) for piece in rows.split(sizes, 1)]


def same_bits(first, second):
    return first.dtype is second.dtype and torch.equal(first, second)


rows_and_shapes = st.integers(1, 4).flatmap(
    lambda num_rows: st.tuples(
        st.just(num_rows),
        st.lists(
            st.tuples(st.integers(0, 3).map(lambda size: num_rows * size), st.integers(1, 3)),
            min_size=1,
            max_size=4,
        ),
    )
)


@given(rows_and_shapes, st.lists(st.sampled_from(DTYPES), min_size=4, max_size=4), st.data())
def test_packing_is_casting_and_joining_row_by_row(rows_and_shapes, dtypes, data):
    num_rows, shapes = rows_and_shapes
    dtype = data.draw(st.sampled_from(DTYPES))
    tensors = members(shapes, dtypes[: len(shapes)])
    packed = PACK_BUCKET(tensors, num_rows, dtype)
    assert same_bits(packed, packed_by_hand(tensors, num_rows, dtype))


@given(rows_and_shapes, st.sampled_from(DTYPES))
def test_unpacking_cuts_every_row(rows_and_shapes, dtype):
    num_rows, shapes = rows_and_shapes
    sizes = [math.prod(shape) // num_rows for shape in shapes]
    bucket = torch.randn(num_rows * sum(sizes)).to(dtype)
    pieces = UNPACK_BUCKET(bucket, num_rows, sizes)
    expected = unpacked_by_hand(bucket, num_rows, sizes)
    assert all(map(same_bits, pieces, expected))
    storages = {piece.untyped_storage()._cdata for piece in (bucket, *pieces)}
    assert len(storages) == 1 + len(sizes)


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize(("given_dtype", "dtype"), [(F32, BF16), (BF16, F32), (F32, F32)])
def test_while_a_cuda_graph_is_recorded_the_same_bits_are_copied_one_by_one(
    monkeypatch, num_rows, given_dtype, dtype
):
    tensors = members([(4, 3), (2, 5)], [given_dtype] * 2)
    sizes = [tensor.numel() // num_rows for tensor in tensors]
    packed = PACK_BUCKET(tensors, num_rows, dtype)
    pieces = UNPACK_BUCKET(packed, num_rows, sizes)

    def refuse(*args, **kwargs):
        raise AssertionError("it reads addresses from host memory")

    monkeypatch.setattr(bucket_copies, "_is_recorded", lambda tensor: True)
    monkeypatch.setattr(torch, "_chunk_cat", refuse)
    monkeypatch.setattr(torch, "split_with_sizes_copy", refuse)
    assert same_bits(PACK_BUCKET(tensors, num_rows, dtype), packed)
    assert all(map(same_bits, UNPACK_BUCKET(packed, num_rows, sizes), pieces))


def calls(a, b) -> list[Node]:
    graph_module = capture(
        lambda a, b: UNPACK_BUCKET(PACK_BUCKET([a, b], 2, BF16), 2, [4, 2]), a, b
    )
    nodes = graph_module.graph.nodes
    return [node for node in nodes if node.target in (PACK_BUCKET, UNPACK_BUCKET)]


def test_they_compute_their_results_and_do_nothing_else():
    for node in calls(torch.ones(2, 4), torch.ones(4)):
        assert not is_barrier(node)
        assert not draws_random_numbers(node)
        assert list(written_nodes(node)) == []
        assert list(shared_nodes(node)) == []


def test_they_are_priced_by_what_they_read_and_write():
    pack, unpack = (work_of(node, SymbolSizes()) for node in calls(torch.ones(2, 4), torch.ones(4)))
    assert (pack.kind, pack.moved_bytes, pack.is_guess) == ("streaming", 12 * (4 + 2), False)
    assert (unpack.kind, unpack.moved_bytes, unpack.is_guess) == ("streaming", 12 * 2 * 2, False)
