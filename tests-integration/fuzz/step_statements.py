"""Statements of random steps: what models do, and what a graph cannot hold.

A statement reads tensors of a pool, by position modulo the size of the pool, and may append one. A
statement that does not fit the shapes at hand does nothing, so that any list is a program. Some
have effects that a capture must record or refuse: writes, attributes, random state, modes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["DIM", "STATEMENTS", "Scope", "Statement", "run_statement"]

DIM = 4
"""Last dim of the input, and of every layer."""


@torch.library.custom_op("capture_fuzz::scale_into", mutates_args=("out",))
def scale_into(x: torch.Tensor, out: torch.Tensor, factor: float) -> None:
    """Write ``factor * x`` to ``out``."""
    out.copy_(x * factor)


@scale_into.register_fake
def _(x: torch.Tensor, out: torch.Tensor, factor: float) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One statement of a program, as data that JSON can hold."""

    kind: str
    first: int
    second: int


class Scope(nn.Module):
    """Layers and state that one statement owns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.gru_cell = nn.GRUCell(DIM, DIM)
        self.lstm = nn.LSTM(DIM, DIM, batch_first=True)
        self.batch_norm = nn.BatchNorm1d(DIM)
        self.register_buffer("average", torch.zeros(DIM))
        self.register_buffer("frozen", torch.linspace(-1.0, 1.0, DIM))
        self.hidden: torch.Tensor | None = None
        self.cache: torch.Tensor | None = None
        self.count = 0
        self.seen: list[Any] = []
        self.scratch: dict[str, Any] = {}
        self.generator = torch.Generator().manual_seed(11)


Apply = Callable[[Scope, torch.Tensor, torch.Tensor], torch.Tensor | None]


def _no_grad_write(write: Callable[[Scope, torch.Tensor, torch.Tensor], object]) -> Apply:
    """Return a statement that writes to a copy of its operand, outside of autograd."""

    def apply(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
        if not a.is_floating_point():
            return None
        copied = a.detach().clone(memory_format=torch.preserve_format)
        with torch.no_grad():
            write(scope, copied, b)
        return a + copied

    return apply


def _with_state(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    value = scope.linear(a)
    if scope.hidden is not None and scope.hidden.shape == value.shape:
        value = value + scope.hidden
    scope.hidden = value.detach()
    return value.tanh()


def _with_cache(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if scope.cache is None:
        scope.cache = torch.arange(DIM, dtype=torch.float32).div(DIM)
    return a * scope.cache


def _with_weight_cache(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if scope.cache is None:
        scope.cache = scope.linear.weight.detach().sum(0)
    return a * scope.cache


def _left_behind(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    scope.scratch["loss"] = a.square().mean()
    return a


def _left_and_taken(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    scope.scratch["loss"] = a.square().mean()
    return a * scope.scratch.pop("loss")


def _appended(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    scope.seen.append(a.detach())
    return a * len(scope.seen)


def _counted(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    scope.count += 1
    return a * scope.count


def _settled(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    scope.count = a.shape[0]
    return a / scope.count


def _normalized_data(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    scope.linear.weight.data = F.normalize(scope.linear.weight.data, dim=1)
    result: torch.Tensor = scope.linear(a)
    return result


def _used_then_assigned_data(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = scope.linear(a)
    scope.linear.weight.data = scope.linear.weight.data * 0.5
    return result


def _clipped_data(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = scope.linear(a)
    scope.linear.weight.data.clamp_(-0.2, 0.2)
    return result


def _buffer_data(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    scope.average.data = scope.average.data * 0.5 + 0.25
    return a + scope.average


def _averaged(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scope.average.lerp_(a.detach().float().mean(tuple(range(a.dim() - 1))), 0.5)
    return a - scope.average.clone()


def _averaged_and_read(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    before = a * scope.average
    with torch.no_grad():
        scope.average = scope.average + 1  # replaced
    return before


def _twice_in_autocast(options: dict[str, Any]) -> Apply:
    def apply(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, **options):
            y = scope.linear(scope.linear(a))
        return y.float()

    return apply


def _nested_autocast(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = scope.linear(a)
        with torch.autocast("cpu", enabled=False):
            y = scope.linear(y.float())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = scope.linear(y)
        y = scope.linear(y)
    return y.float()


def _frozen_then_trained_autocast(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            target = scope.linear(a)
        y = scope.linear(a) - target.tanh()
    return y.float()


def _seeded_noise(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return a * torch.rand(DIM)


def _repeated_noise(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    first = F.dropout(a, 0.5)
    torch.set_rng_state(state)
    return first - F.dropout(a, 0.5)


def _generator_noise(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + torch.rand(DIM, generator=scope.generator)


def _own_generator(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + torch.rand(DIM, generator=torch.Generator().manual_seed(3))


def _lstm(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    if a.dim() != 3:
        return None
    output: torch.Tensor = scope.lstm(a)[0]
    return output


def _gru_steps(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    if a.dim() != 3:
        return None
    hidden = torch.zeros_like(a[:, 0])
    states = []
    for position in range(a.shape[1]):
        hidden = scope.gru_cell(a[:, position], hidden)
        states.append(hidden)
    return torch.stack(states, 1).exp()


def _gate(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    left, right = torch.unsafe_chunk(scope.linear(a).exp(), 2, -1)
    return torch.cat([left.sigmoid_() * right, right], -1)


def _spectrum(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.fft.rfft(a, dim=-1).abs().sum(-1, keepdim=True) + a


def _conjugates(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    z = torch.complex(a, a.flip(-1))
    return (z * z.conj()).real + z.conj().imag


def _checkpointed(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    def body(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = scope.linear(x).tanh()
        return result

    result: torch.Tensor = checkpoint(body, a, use_reentrant=False)
    return result


def _batch_norm(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    if a.dim() != 3:
        return None
    result: torch.Tensor = scope.batch_norm(a.transpose(1, 2)).transpose(1, 2)
    return result


def _loss_of(function: Callable[..., torch.Tensor]) -> Apply:
    """Return a statement that scales by a loss whose operand is transposed."""

    def apply(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        turned = scope.linear(a).transpose(0, -1)
        return a * function(turned, torch.zeros_like(turned))

    return apply


def _activation(function: Callable[[torch.Tensor], torch.Tensor]) -> Apply:
    """Return a statement that applies an activation to a transposed operand."""

    def apply(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return function(scope.linear(a).transpose(0, -1)).transpose(0, -1)

    return apply


def _bounded(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    turned = scope.linear(a).transpose(0, -1)
    bound = scope.linear.bias.view(-1, *[1] * (a.dim() - 1))
    return torch.maximum(turned, bound).clamp(max=bound + 0.5).transpose(0, -1)


def _filled(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.masked_fill(b > 0, scope.linear.bias[0]) if a.shape == b.shape else a


def _into_buffer(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = scope.linear(a)
    written = torch.zeros_like(y)
    with torch.no_grad():
        scale_into(y.detach(), written, 3.0)
    return (y * written).sigmoid()


def _diagonal_write(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    square = scope.linear(a).reshape(-1, DIM)
    square = square.t() @ square
    square.diagonal().add_(scope.frozen)
    return a @ square.softmax(-1)


def _input_write(scope: Scope, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        a.detach().mul_(0.5)
    return a * 2


STATEMENTS: dict[str, Apply] = {
    # Plain layers.
    "linear": lambda scope, a, b: scope.linear(a),
    "softmax": lambda scope, a, b: a.softmax(-1),
    "layer_norm": lambda scope, a, b: F.layer_norm(a, (DIM,)),
    "add": lambda scope, a, b: a + b if a.shape == b.shape else a + 1,
    "mul": lambda scope, a, b: a * b.tanh() if a.shape == b.shape else a * 0.5,
    "batch_norm": _batch_norm,
    "lstm": _lstm,
    "gru_steps": _gru_steps,
    "gate": _gate,
    "spectrum": _spectrum,
    "conjugates": _conjugates,
    "checkpointed": _checkpointed,
    "softplus": _activation(F.softplus),
    "gelu": _activation(F.gelu),
    "elu": _activation(F.elu),
    "hardswish": _activation(F.hardswish),
    "silu": _activation(F.silu),
    "mse_loss": _loss_of(F.mse_loss),
    "smooth_l1_loss": _loss_of(F.smooth_l1_loss),
    "huber_loss": _loss_of(F.huber_loss),
    "bounded": _bounded,
    "filled": _filled,
    "greatest": lambda scope, a, b: a * (a.max() - a.median()),
    # Layouts. The last dim keeps its size.
    "swap_rows": lambda scope, a, b: a.transpose(0, 1) if a.dim() == 3 else None,
    "turned_copy": lambda scope, a, b: a.transpose(0, -1).contiguous().transpose(0, -1),
    "every_second": lambda scope, a, b: a[::2] if a.shape[0] > 1 else None,
    "tail": lambda scope, a, b: a[1:] if a.shape[0] > 1 else None,
    "flattened": lambda scope, a, b: a.flatten(0, -2),
    "viewed": lambda scope, a, b: a.view(-1, DIM) if a.is_contiguous() else None,
    "expanded": lambda scope, a, b: a[:1].expand(a.shape),
    "strided": lambda scope, a, b: (
        torch.as_strided(a, (2, DIM), (1, 1)) if a.numel() > DIM + 1 else None
    ),
    "flipped": lambda scope, a, b: a.flip(0),
    "cumulated": lambda scope, a, b: a.cumsum(0),
    "branch_on_layout": lambda scope, a, b: a * 2 if a.is_contiguous() else a * 3,
    # Writes.
    "add_": _no_grad_write(lambda scope, a, b: a.add_(b) if a.shape == b.shape else a.add_(1)),
    "zero_first": _no_grad_write(lambda scope, a, b: a[:1].zero_()),
    "write_turned": _no_grad_write(lambda scope, a, b: a.transpose(0, -1)[:1].mul_(2)),
    "write_diagonal": _no_grad_write(lambda scope, a, b: a[..., 0].fill_(0.5)),
    "grad_write": lambda scope, a, b: scope.linear(a).sigmoid_().mul_(2),
    "into_buffer": _into_buffer,
    "diagonal_write": _diagonal_write,
    "input_write": _input_write,
    "averaged": _averaged,
    "buffer_replaced": _averaged_and_read,
    "clipped_data": _clipped_data,
    "normalized_data": _normalized_data,
    "used_then_assigned_data": _used_then_assigned_data,
    "buffer_data": _buffer_data,
    # Attributes.
    "recurrent": _with_state,
    "cached": _with_cache,
    "cached_weight": _with_weight_cache,
    "left_behind": _left_behind,
    "left_and_taken": _left_and_taken,
    "appended": _appended,
    "counted": _counted,
    "settled": _settled,
    # Random numbers and random state.
    "dropout": lambda scope, a, b: F.dropout(a, 0.5),
    "noise": lambda scope, a, b: a + torch.rand_like(a),
    "permuted": lambda scope, a, b: a[torch.randperm(a.shape[0])],
    "seeded_noise": _seeded_noise,
    "repeated_noise": _repeated_noise,
    "generator_noise": _generator_noise,
    "own_generator": _own_generator,
    "numpy_noise": lambda scope, a, b: a * float(numpy.random.rand()),
    "numpy_tensor": lambda scope, a, b: a + torch.tensor(numpy.random.rand(DIM)).float(),
    "python_noise": lambda scope, a, b: a * random.random(),
    "python_branch": lambda scope, a, b: a * 2 if random.random() < 0.5 else a * 3,
    # Modes.
    "autocast": _twice_in_autocast({}),
    "autocast_cached": _twice_in_autocast({"cache_enabled": True}),
    "autocast_uncached": _twice_in_autocast({"cache_enabled": False}),
    "nested_autocast": _nested_autocast,
    "frozen_then_trained": _frozen_then_trained_autocast,
    "detached": lambda scope, a, b: a.detach() * 0.5,
}
"""Statements by kind. Each takes its scope and two tensors, and returns a tensor or None."""


def run_statement(
    statement: Statement, scope: Scope, pool: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """Run a statement on tensors of a pool.

    Args:
        statement: names its operands by position, modulo the size of the pool.
        scope: layers and state of this statement.
        pool: tensors of shape (..., DIM), float32.

    Returns:
        The tensor to append, or None.
    """
    a, b = pool[statement.first % len(pool)], pool[statement.second % len(pool)]
    return STATEMENTS[statement.kind](scope, a, b)
