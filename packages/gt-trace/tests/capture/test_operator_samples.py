"""PyTorch's own samples of operators, captured on operands that are not contiguous.

A captured call gives the bits of eager, forward and backward, or is refused.
"""

from __future__ import annotations

import pytest
import torch
from strided_samples import compare, operators

NUM_SHARDS = 12

_NOT_FILLED = "its results are memory that nobody filled"

EXCEPTIONS: dict[str, str] = {
    "empty": _NOT_FILLED,
    "empty_like": _NOT_FILLED,
    "empty_permuted": _NOT_FILLED,
    "empty_strided": _NOT_FILLED,
    "new_empty": _NOT_FILLED,
    "new_empty_strided": _NOT_FILLED,
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "where the last dim is not dense, "
    "its results depend on memory beside its operands; scaled_dot_product_attention does not call "
    "it with these",
}
"""Operators that are left out, with the reason."""


DTYPES = (torch.float32, torch.bfloat16, torch.complex64)


def _assert_equal_or_refused(
    shard: int, num_shards: int, num_samples: int, dtype: torch.dtype
) -> None:
    outcomes = compare(
        operators(shard, num_shards, dtype),
        num_samples=num_samples,
        skip=frozenset(EXCEPTIONS),
        dtype=dtype,
    )
    print(len(outcomes.operators), "operators:", dict(outcomes.counts))
    print("refused:", outcomes.refused, "without a fake kernel:", outcomes.failed)
    assert not outcomes.different
    assert outcomes.counts["equal"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_few_operators_are_as_in_eager(dtype: torch.dtype):
    _assert_equal_or_refused(3, 160, 1, dtype)


@pytest.mark.slow  # some minutes for a shard
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_every_operator_is_as_in_eager_or_refused(shard: int, dtype: torch.dtype):
    _assert_equal_or_refused(shard, NUM_SHARDS, 2, dtype)
