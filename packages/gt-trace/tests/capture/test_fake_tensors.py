"""Fake tensors that are made quickly are those that PyTorch's constructor makes."""

from __future__ import annotations

import pytest
import torch

from gt_trace._torch_internals import FakeTensor, FakeTensorMode, fake_over_meta, storage_key
from gt_trace.capture.fake_tensors import fake_over


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_fake_tensor_is_as_the_constructor_makes_it(device: str, requires_grad: bool) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.allow_meta = True
    element = torch.empty((2, 3), dtype=torch.bfloat16, device="meta").t()
    element.requires_grad_(requires_grad)
    made = fake_over_meta(element, mode, torch.device(device), dispatch_keys=None)
    expected = FakeTensor(mode, element, torch.device(device))
    assert type(made) is FakeTensor
    assert vars(made) == vars(expected)
    assert torch._C._dispatch_keys(made) == torch._C._dispatch_keys(expected)
    for facts in ("shape", "dtype", "device", "layout", "requires_grad"):
        assert getattr(made, facts) == getattr(expected, facts)
    assert made.stride() == expected.stride() == (1, 3)
    assert storage_key(made) == storage_key(element)


def test_fake_tensors_share_nothing_that_one_of_them_learns() -> None:
    mode = FakeTensorMode()
    made = [
        fake_over_meta(
            torch.empty((2,), device="meta"), mode, torch.device("cpu"), dispatch_keys=None
        )
        for _ in range(2)
    ]
    made[0].dispatch_keys = torch._C._dispatch_keys(made[0])
    assert made[1].dispatch_keys is None
    assert fake_over(made[0], torch.empty((3,), device="meta")).dispatch_keys is not None
