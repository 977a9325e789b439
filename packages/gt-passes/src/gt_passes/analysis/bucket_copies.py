"""Operators that copy tensors into a bucket and out of it: one kernel each on a GPU.

::

    packed = gt_passes.pack_bucket([a, b], 1, bfloat16)      # a: f32[2, 4], b: f32[4]; bf16[12]
    x, y = gt_passes.unpack_bucket(gathered, 8, [8, 4])      # bf16[96]; bf16[64] and bf16[32]

A bucket has rows, one for each rank where ranks cut it up. Row r of a packed bucket holds the r-th
part of every member, cast on the way; unpacking is the other way round, without a cast. Elements
are copied and cast, and nothing is computed, so both are exact.

ATen has kernels for this (those that FSDP2 copies with), and no functional operator that runs them:
``_chunk_cat`` casts only with ``out=``, and of ``split_with_sizes_copy`` only the form with
``out=`` has a kernel; the other clones piece by piece. Graphs in which nodes are moved should not
be full of buffers that are written to, so the writing is inside of these operators. Two of the
kernels read addresses from host memory that is gone when a CUDA graph replays them: while one is
recorded, pieces are copied one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gt_passes.analysis.operator_effects import declare_pure_operator

_library = torch.library.Library("gt_passes", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's
for _schema in (
    "pack_bucket(Tensor[] members, int num_rows, ScalarType dtype) -> Tensor",
    "unpack_bucket(Tensor bucket, int num_rows, int[] row_sizes) -> Tensor[]",
):
    _library.define(_schema)  # type: ignore[no-untyped-call]  # torch's
    declare_pure_operator(f"gt_passes::{_schema.partition('(')[0]}")

PACK_BUCKET = torch.ops.gt_passes.pack_bucket.default
"""``pack_bucket(members, num_rows, dtype)``: one flat tensor, row by row. Members are contiguous,
and their elements divide into rows."""

UNPACK_BUCKET = torch.ops.gt_passes.unpack_bucket.default
"""``unpack_bucket(bucket, num_rows, row_sizes)``: flat tensors in memory of their own, of
``num_rows * row_size`` elements each."""

BUCKET_COPIES = frozenset({PACK_BUCKET, UNPACK_BUCKET})


@torch.library.impl(_library, "pack_bucket", "CompositeExplicitAutograd")
def _pack_bucket(
    members: Sequence[torch.Tensor], num_rows: int, dtype: torch.dtype
) -> torch.Tensor:
    packed = _empty_bucket(members, num_rows, dtype)
    if num_rows == 1:
        # One kernel, whatever the dtypes, where both sides are flat.
        sizes = [member.numel() for member in members]
        torch._foreach_copy_(
            packed.split_with_sizes(sizes), [member.view(-1) for member in members]
        )
        return packed
    parts = [_rows(member, num_rows) for member in members]
    given = {part.dtype for part in parts}
    # What _chunk_cat has a kernel for.
    fuses = given == {dtype} or (given, dtype) == ({torch.bfloat16}, torch.float32)
    if fuses and not _is_recorded(packed) and all(part.numel() for part in parts):
        torch._chunk_cat(parts, 0, num_rows, out=_rows(packed, num_rows))
    else:
        sizes = [part.shape[1] for part in parts]
        torch._foreach_copy_(_rows(packed, num_rows).split_with_sizes(sizes, 1), parts)
    return packed


@torch.library.impl(_library, "unpack_bucket", "CompositeExplicitAutograd")
def _unpack_bucket(
    bucket: torch.Tensor, num_rows: int, row_sizes: Sequence[int]
) -> list[torch.Tensor]:
    members = _empty_members(bucket, num_rows, row_sizes)
    rows, parts = _rows(bucket, num_rows), [_rows(member, num_rows) for member in members]
    if _is_recorded(bucket):
        torch._foreach_copy_(parts, rows.split_with_sizes(row_sizes, 1))
    else:
        torch.split_with_sizes_copy(rows, row_sizes, 1, out=parts)
    return members


def _empty_bucket(
    members: Sequence[torch.Tensor], num_rows: int, dtype: torch.dtype
) -> torch.Tensor:
    return members[0].new_empty(sum(member.numel() for member in members), dtype=dtype)


def _empty_members(
    bucket: torch.Tensor, num_rows: int, row_sizes: Sequence[int]
) -> list[torch.Tensor]:
    return [bucket.new_empty(num_rows * size) for size in row_sizes]


def _rows(flat: torch.Tensor, num_rows: int) -> torch.Tensor:
    return flat.view(num_rows, flat.numel() // num_rows)


def _is_recorded(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


for _name, _fake in (("pack_bucket", _empty_bucket), ("unpack_bucket", _empty_members)):
    torch.library.register_fake(f"gt_passes::{_name}", _fake, lib=_library)
