"""Steps with operators that return views under schemas which deny it, through every memory policy."""

from __future__ import annotations

import pytest
import torch
from program_pairs import differences
from torch import nn

from gt_config import CompileConfig, MemoryPolicy
from gt_passes import optimize
from gt_trace import trace_step

aten = torch.ops.aten
X = torch.rand(4, 6)
POLICIES: tuple[MemoryPolicy, ...] = (
    "save_all",
    "selective",
    "selective_alternate",
    "full_recompute",
    "offload",
)


class Recurrent(nn.Module):
    """A cell over the positions of a sequence, in a residual."""

    def __init__(self, kind: type[nn.GRUCell] | type[nn.LSTMCell]):
        super().__init__()
        self.norm, self.cell, self.out = nn.LayerNorm(8), kind(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        inputs = self.norm(x).tanh()
        hidden = cell = torch.zeros_like(inputs[:, 0])
        states = []
        for position in inputs.unbind(1):
            if isinstance(self.cell, nn.LSTMCell):
                hidden, cell = self.cell(position, (hidden, cell))
            else:
                hidden = self.cell(position, hidden)
            states.append(hidden)
        return x + self.out(torch.stack(states, 1).exp())


class Gated(nn.Module):
    """A gate that is written in place, in a part of what a product gave."""

    def __init__(self, cut):
        super().__init__()
        self.cut = cut
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        gate, value = self.cut(self.up(x).exp())
        return x + self.down(gate.sigmoid_() * value)


LAYERS = {
    "GRUCell": lambda: Recurrent(nn.GRUCell),
    "LSTMCell": lambda: Recurrent(nn.LSTMCell),
    "unsafe_chunk": lambda: Gated(lambda x: torch.unsafe_chunk(x, 2, -1)),
    "unsafe_split": lambda: Gated(lambda x: torch.unsafe_split(x, 8, -1)),
    "sizes": lambda: Gated(lambda x: torch.unsafe_split_with_sizes(x, [8, 8], -1)),
}


class Layers(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_keep_every_bit(layer: str, policy: MemoryPolicy):
    torch.manual_seed(0)
    model, x = Layers(LAYERS[layer]), torch.randn(2, 2, 8)

    def step(x):
        loss = model(x).square().mean()
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    expected = step(x)
    traced = trace_step(step, module=model)(x)
    assert optimize(traced, CompileConfig(memory_policy=policy)).verified
    for got, want in zip(traced.bind(model)(x), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("cut", [torch.unsafe_chunk, torch.chunk])
def test_clean_up_keeps_a_copy_of_a_part_whose_source_is_written_later(cut, num_parts: int):
    def step(x):
        whole = x.exp()
        kept = cut(whole, num_parts)[0].clone()
        whole.add_(1)
        return kept * 2, whole

    expected = step(X)
    traced = trace_step(step)(X)
    optimize(traced, CompileConfig())
    for got, want in zip(traced.bind()(X), expected, strict=True):
        assert torch.equal(got, want)


def written_after(share, *, read_late: bool):
    """A program that writes to memory and reads what may share it before or afterwards."""

    def program(x):
        whole = x.exp()
        shared = share(whole)
        if read_late:
            whole.add_(1)
            return shared.cos(), whole
        read = shared.cos()
        whole.add_(1)
        return read, whole

    return program


SHARED = {
    "unsafe_split": lambda x: aten.unsafe_split.Tensor(x, 2)[0],
    "unsafe_split_with_sizes": lambda x: aten.unsafe_split_with_sizes.default(x, [1, 3])[1],
    "device_put": lambda x: torch.ops.prims.device_put.default(x, torch.device("cpu")),
    "native_dropout": lambda x: aten.native_dropout.default(x, 0.5, False)[0],
}


@pytest.mark.parametrize("name", SHARED)
def test_the_verifier_refuses_a_read_that_moved_past_a_write(name: str):
    early, late = (written_after(SHARED[name], read_late=each) for each in (False, True))
    assert differences(early, late, X)
    assert differences(late, early, X)
    assert not differences(late, late, X)


@pytest.mark.parametrize("name", ["device_put", "native_dropout"])
def test_the_verifier_refuses_to_move_what_may_copy_past_a_write(name: str):
    def copied_late(x):
        whole = x.exp()
        whole.add_(1)
        return SHARED[name](whole).cos(), whole

    assert differences(written_after(SHARED[name], read_late=True), copied_late, X)
