"""FlexAttention's masks in microbatches: each is the mask of its own samples."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
)

from gt_pipeline.errors import MicrobatchError
from gt_pipeline.runner.microbatches import MicrobatchDims, split_microbatches

LENGTH, BLOCK = 64, 16


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def mask_of(documents: Tensor, **options: bool) -> BlockMask:
    def same(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return documents[b, q] == documents[b, k]

    shape = (len(documents), None, LENGTH, LENGTH)
    return create_block_mask(
        and_masks(causal, same), *shape, device="cpu", BLOCK_SIZE=BLOCK, **options
    )


@pytest.fixture
def documents() -> Tensor:
    """Of six samples."""
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(6, LENGTH, generator=generator) < 0.05).int().cumsum(1)


def split(mask: Any, count: int, *, dim: int | None = 0) -> list[Any]:
    parts = split_microbatches(
        (), {"mask": mask}, None, num_microbatches=count, dims=MicrobatchDims(kwargs={"mask": dim})
    )
    return [part.kwargs["mask"] for part in parts]


def dense(mask: BlockMask) -> Tensor:
    """What its function says of every pair of positions."""
    return create_mask(mask.mask_mod, mask.shape[0], 1, LENGTH, LENGTH, device="cpu")


def assert_same_mask(found: BlockMask, wanted: BlockMask) -> None:
    for name, value in vars(wanted).items():
        if isinstance(value, Tensor):
            assert torch.equal(getattr(found, name), value), name
        elif name != "mask_mod":
            assert getattr(found, name) == value, name
    assert torch.equal(dense(found), dense(wanted))


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_each_part_is_the_mask_of_its_samples(documents: Tensor, count: int) -> None:
    parts = split(mask_of(documents), count)
    assert len(parts) == count
    for part, of_part in zip(parts, documents.chunk(count), strict=True):
        assert_same_mask(part, mask_of(of_part))


@pytest.mark.skipif(
    "compute_dq_write_order" not in inspect.signature(create_block_mask).parameters,
    reason="masks of torch before 2.13 hold no such order",
)
def test_the_order_in_which_a_deterministic_backward_writes_is_split_too(
    documents: Tensor,
) -> None:
    first, second = split(mask_of(documents, compute_dq_write_order=True), 2)
    assert first.dq_write_order is not None
    assert_same_mask(first, mask_of(documents[:3], compute_dq_write_order=True))
    assert_same_mask(second, mask_of(documents[3:], compute_dq_write_order=True))


def test_parts_are_those_of_pytorchs_own_pipelines(documents: Tensor) -> None:
    mask = mask_of(documents)
    _, theirs = split_args_kwargs_into_chunks((), {"mask": mask}, 3)
    for part, their in zip(split(mask, 3), theirs, strict=True):
        assert_same_mask(part, their["mask"])


def test_the_mask_of_one_sample_serves_all_microbatches(documents: Tensor) -> None:
    mask = mask_of(documents[:1])
    assert all(part is mask for part in split(mask, 3))


def test_a_mask_goes_whole_to_every_microbatch_if_that_is_asked_for(documents: Tensor) -> None:
    mask = mask_of(documents)
    assert all(part is mask for part in split(mask, 4, dim=None))


def test_masks_of_kinds_of_layers_are_all_split(documents: Tensor) -> None:
    by_kind = {
        "full": mask_of(documents),
        "window": create_block_mask(causal, None, None, 64, 64, device="cpu"),
        "none": None,
    }
    first, second = split(by_kind, 2)
    assert_same_mask(first["full"], mask_of(documents[:3]))
    assert_same_mask(second["full"], mask_of(documents[3:]))
    assert first["window"] is second["window"] is by_kind["window"]
    assert first["none"] is second["none"] is None


def test_refuses_what_does_not_split(documents: Tensor) -> None:
    with pytest.raises(MicrobatchError) as caught:
        split_microbatches(
            (mask_of(documents),),
            {"masks": [mask_of(documents)]},
            None,
            num_microbatches=4,
            dims=MicrobatchDims(kwargs={"masks": 2}),
        )
    assert caught.value.problems == (
        "argument 0 is a BlockMask of 6 samples, which is no multiple of 4",
        (
            "argument 'masks'[0] is a BlockMask and was given dimension 2: a part of the queries "
            "needs all keys, so masks are split along samples only: give it 0, or None to pass it "
            "whole to every microbatch"
        ),
    )
