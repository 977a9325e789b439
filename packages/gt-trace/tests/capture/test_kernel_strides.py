"""Fake tensors of captures lie as the results of kernels do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gt_trace import trace_step
from gt_trace._torch_internals import FakeTensorMode
from gt_trace.capture.kernel_strides import new_fake_mode

aten = torch.ops.aten
TURNED = torch.rand(2, 6, 4).transpose(1, 2)
SPREAD = torch.rand(()).expand(2, 4, 6)
LAST = torch.rand(2, 5, 6, 3).permute(0, 3, 1, 2)

CALLS = {
    "mse_loss_backward": lambda x, g, _: aten.mse_loss_backward(g.sum(), x, x, 1),
    "smooth_l1_loss_backward": lambda x, g, _: aten.smooth_l1_loss_backward(g, x, x, 0, 1.0),
    "huber_loss_backward": lambda x, g, _: aten.huber_loss_backward(g, x, x, 0, 1.0),
    "softplus_backward": lambda x, g, _: aten.softplus_backward(g, x, 1.0, 20.0),
    "hardswish_backward": lambda x, g, _: aten.hardswish_backward(g, x),
    "elu_backward": lambda x, g, _: aten.elu_backward(g, 1.0, 1.0, 1.0, False, x),
    "logit_backward": lambda x, g, _: aten.logit_backward(g, x),
    "copysign": lambda x, g, _: aten.copysign(x, 1.0),
    "floor_divide": lambda x, g, _: x // 2,
    "pow": lambda x, g, _: 2**x,
    "heaviside": lambda x, g, _: aten.heaviside(x, g),
    "logaddexp": lambda x, g, _: aten.logaddexp(x[:, :1], x[0]),
    "batch_norm": lambda x, g, _: F.batch_norm(x, None, None, training=True),
    "log_softmax_backward": lambda x, g, _: aten._log_softmax_backward_data(
        x, x.contiguous(), -1, torch.float32
    ),
    "layer_norm_backward": lambda x, g, _: aten.native_layer_norm_backward(
        x, x, [6], x[..., :1], x[..., :1], x[0, 0], x[0, 0], [True, True, True]
    )[0],
    "log_sigmoid": lambda x, g, _: aten.log_sigmoid_forward(x)[0],
    "reflection_pad2d_backward": lambda x, g, y: aten.reflection_pad2d_backward(
        F.pad(y, (1, 1, 1, 1)).contiguous(memory_format=torch.channels_last), y, [1, 1, 1, 1]
    ),
}


def _strides(tensor: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _fakes(mode: FakeTensorMode) -> list[torch.Tensor]:
    return [mode.from_tensor(each, static_shapes=True) for each in (TURNED, SPREAD, LAST)]


@pytest.mark.parametrize("name", CALLS)
def test_results_lie_as_those_of_the_kernel(name: str):
    real = CALLS[name](TURNED, SPREAD, LAST)
    mode = new_fake_mode()
    with mode:
        fake = CALLS[name](*_fakes(mode))
    assert _strides(fake) == _strides(real)
    assert fake.shape == real.shape
    assert fake.dtype == real.dtype


def test_a_large_tensor_lies_as_a_small_one_of_the_same_order():
    mode = new_fake_mode()
    with mode:
        large = torch.empty(1 << 10, 1 << 12, 1 << 10).transpose(1, 2)
        assert aten.mse_loss_backward(large.sum(), large, large, 1).is_contiguous()


class Forecaster(nn.Module):
    """Ends as DLinear, PatchTST and PatchTSMixer do."""

    def __init__(self):
        super().__init__()
        self.head, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(self.head(x).transpose(1, 2))


LOSSES = {
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "softplus": lambda y, t: F.softplus(y).mean(),
    "hardswish": lambda y, t: F.hardswish(y).mean(),
    "elu": lambda y, t: F.elu(y).mean(),
    "logit": lambda y, t: y.sigmoid().logit().mean(),
    "copysign": lambda y, t: y.copysign(t[0, 0, 0]).reshape(-1).mean(),
    "floor": lambda y, t: (y * (y.detach() // 0.5).reshape(-1).view_as(y)).mean(),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_a_step_on_turned_activations_is_eager_s(name: str, is_dynamic: bool):
    torch.manual_seed(0)
    model = Forecaster()

    def step(x, target):
        loss = LOSSES[name](model(x), target)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    batch = torch.randn(4, 6, 6), torch.randn(4, 6, 6)
    if is_dynamic:
        for each in batch:
            torch._dynamo.mark_dynamic(each, 0)
    statistics = [each.clone() for each in model.buffers()]
    expected = step(*batch)
    for buffer, before in zip(model.buffers(), statistics, strict=True):
        buffer.copy_(before)
    traced = trace_step(step, module=model)(*batch)
    for got, want in zip(traced.bind(model)(*batch), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("function", [torch.exp, torch.clone, F.gelu, lambda x: x + torch.ones(4)])
@pytest.mark.parametrize("windows", [((2, 4), (1, 1)), ((2, 3, 4), (1, 2, 1)), ((4, 4), (1, 2))])
def test_results_of_overlapping_windows_lie_as_in_eager(windows, function):
    def step(x):
        y = function(torch.as_strided(x, *windows))
        return y * (2 if y.is_contiguous() else 3)

    x = torch.randn(6, 4)
    assert torch.equal(trace_step(step)(x).bind()(x), step(x))
