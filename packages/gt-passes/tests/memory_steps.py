"""Steps over aliasing operators, host copies and constants, for campaigns of random edits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from mutation_graphs import StepGraph, step_graph
from pass_graphs import capture

from gt_passes import PassContext
from gt_passes.analysis.host_copies import OFFLOAD, RELOAD, WAIT_COPY

aten = torch.ops.aten


def aliasing(x, y, mean, var):
    """In-place operators through views with a rule and without, and results that may be views."""
    buffer = (x + y).clone()
    early = buffer.exp()
    buffer.diagonal().add_(y[0])
    buffer.diagonal(1).mul_(y[1, :5])
    middle = buffer.sum(1)
    buffer.unfold(0, 2, 2)[:, 0].mul_(y[:3, :2])
    torch.view_as_complex(buffer.view(6, 3, 2)).mul_(torch.view_as_complex(y.view(6, 3, 2)))
    buffer.as_strided((6,), (7,)).sub_(x[2])
    first, second = torch.unsafe_split(x * y, 3)
    first.sigmoid_()
    kept, _ = aten.native_dropout(second * 2.0, 0.5, False)
    kept = kept.exp()
    torch._foreach_add_([buffer[1], buffer[2:4].t()], [y[0], first[:2].t()])
    joined = torch.empty(6, 12)
    joined[:, :6].copy_(buffer)
    joined[:, 6:].copy_(y.transpose(0, 1))
    z = torch.complex(x, y)
    product = torch.view_as_real(z @ z.conj()).select(-1, 0) + z.imag
    normal = torch.nn.functional.batch_norm(x, mean, var, training=True)
    torch.mul(normal, y, out=joined[:, 3:9])
    part = joined.narrow(1, -3, 3).cos()
    buffer[0].copy_(middle)
    return early, middle, buffer, first, kept, joined.exp(), product, normal, part


def host_copies(x, y):
    """Tensors that go to the host and come back, one of them written to afterwards."""
    values = [(x * 2.0).exp(), (y + x).cos(), (x * y).sin()]
    hosts = []
    for value in values:
        started = OFFLOAD(value)
        between = value.sum(0)
        hosts.append((WAIT_COPY(started, value), between))
    values[0].mul_(3.0)
    late = values[0].exp()
    results = [late]
    for host, between in reversed(hosts):
        returning = RELOAD(host, x.device)
        scaled = between * 2.0
        back = WAIT_COPY(returning, host)
        results += [back.tanh(), scaled]
    hosts[1][0].add_(1.0)
    return (*results, hosts[1][0].exp())


_LARGE = torch.arange(2.0**18 + 8)
_SMALL = torch.arange(36.0).view(6, 6)
_WRITTEN = torch.zeros(6, 6)


def constants(x, y):
    """A constant that is large, one that is read several times, and one that is written."""
    total = _LARGE.sum() + _LARGE[7]
    first = (x * _SMALL).exp()
    _WRITTEN.add_(x)
    second = _WRITTEN * 2.0
    _WRITTEN[0].mul_(y[0])
    third = _WRITTEN.diagonal().exp()
    _WRITTEN[1:].add_(y[1:])
    return total * y, first + _SMALL, second, third, _SMALL.t() @ y


_STEPS: dict[str, tuple[Callable[..., object], int]] = {
    "aliasing": (aliasing, 2),
    "host copies": (host_copies, 2),
    "constants": (constants, 2),
}

MEMORY_STEPS = tuple(_STEPS)


def memory_step(name: str) -> StepGraph:
    """Capture one of ``MEMORY_STEPS``."""
    function, num_squares = _STEPS[name]
    inputs = [torch.ones(6, 6) for _ in range(num_squares)]
    if name == "aliasing":
        inputs += [torch.zeros(6), torch.ones(6)]
    graph_module = capture(function, *inputs)
    return step_graph(name, graph_module, PassContext.from_graph(graph_module))
