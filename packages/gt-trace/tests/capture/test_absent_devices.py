"""What of a capture for GPUs a machine without any can make: docs/decisions/0047 says why no more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gt_trace import trace_step

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or torch.version.cuda is None,
    reason="of PyTorch built for CUDA, where there is no GPU",
)


@pytest.fixture
def on_meta() -> nn.Linear:
    return nn.Linear(4, 4, device="meta")


def test_a_forward_for_gpus_is_captured_without_one(on_meta: nn.Linear) -> None:
    rows = torch.empty(2, 4, device="meta")
    traced = trace_step(on_meta, module=on_meta, meta_device="cuda")(rows)

    devices = {each.device for each in traced.example_inputs if isinstance(each, Tensor)}
    assert devices == {torch.device("cuda", 0)}


def test_a_backward_for_gpus_is_not_since_autograd_asks_the_driver(on_meta: nn.Linear) -> None:
    """``precompile`` makes graphs for GPUs on a machine with one, as long as this holds."""

    def step(rows: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(on_meta(rows).sum(), list(on_meta.parameters()))

    with pytest.raises(RuntimeError, match="hasPrimaryContext expects a valid device index"):
        trace_step(step, module=on_meta, meta_device="cuda")(torch.empty(2, 4, device="meta"))
