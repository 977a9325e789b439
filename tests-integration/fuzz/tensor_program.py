"""A layer that is a list of random instructions on a pool of tensors.

Models alias and write little; passes must be right also for those that do more. An instruction is
an operation and the positions in the pool of what it takes, counted modulo the size of the pool; one
that does not fit the shapes at hand does nothing, so that any list is a program.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from fuzz.custom_ops import observe, scale_

__all__ = ["Instruction", "draw_program", "run_program"]

Instruction = tuple[str, int, int]
"""Operation, position of the first tensor, position of the second."""

_functional = torch.ops._c10d_functional
_aten = torch.ops.aten

_NEW: dict[str, Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor | None]] = {
    # Views, of which some change nothing.
    "alias": lambda a, b, group: _aten.alias(a),
    "detach": lambda a, b, group: a.detach(),
    "flatten_view": lambda a, b, group: a.view(-1) if a.is_contiguous() else None,
    "square_view": lambda a, b, group: (
        a.view(2, -1) if a.is_contiguous() and a.numel() % 2 == 0 else None
    ),
    "transpose": lambda a, b, group: a.t() if a.dim() == 2 else None,
    "first_half": lambda a, b, group: a[: a.shape[0] // 2] if a.shape[0] > 1 else None,
    "whole_slice": lambda a, b, group: a[:],
    "unsqueeze": lambda a, b, group: a.unsqueeze(0) if a.dim() < 3 else None,
    "squeeze": lambda a, b, group: a.squeeze(0) if a.dim() > 1 and a.shape[0] == 1 else None,
    "select": lambda a, b, group: a.select(0, 0) if a.dim() > 1 else None,
    # Copies, of which some change nothing.
    "clone": lambda a, b, group: a.clone(),
    "contiguous": lambda a, b, group: a.contiguous(),
    "to_own_dtype": lambda a, b, group: _aten._to_copy(a, dtype=a.dtype),
    "round_to_bfloat16": lambda a, b, group: a.bfloat16().float(),
    # Arithmetic.
    "add": lambda a, b, group: a + b if a.shape == b.shape else a + 1,
    "mul": lambda a, b, group: a * b if a.shape == b.shape else a * 0.5,
    "tanh": lambda a, b, group: a.tanh(),
    "literal": lambda a, b, group: a * torch.tensor(0.75),
    # Random numbers, also of results that nobody reads.
    "noise": lambda a, b, group: a + torch.rand_like(a),
    "dead_noise": lambda a, b, group: _forget(torch.rand_like(a)),
    "dead_sum": lambda a, b, group: _forget(a.exp().sum()),
    # Collectives.
    "all_gather": lambda a, b, group: (
        _functional.wait_tensor(_functional.all_gather_into_tensor(a.contiguous(), 2, group))
        if a.numel() <= 64
        else None
    ),
    "reduce_scatter": lambda a, b, group: (
        _functional.wait_tensor(_functional.reduce_scatter_tensor(a.contiguous(), "sum", 2, group))
        if a.shape[0] % 2 == 0
        else None
    ),
    "all_reduce": lambda a, b, group: _functional.wait_tensor(
        _functional.all_reduce(a.contiguous(), "sum", group)
    ),
    "swap": lambda a, b, group: (
        _functional.wait_tensor(
            _functional.all_to_all_single(
                a.contiguous(), [a.shape[0] // 2] * 2, [a.shape[0] // 2] * 2, group
            )
        )
        if a.shape[0] % 2 == 0
        else None
    ),
    # What nobody knows.
    "observe": lambda a, b, group: observe(a),
}


def _forget(tensor: torch.Tensor) -> None:
    """Nobody reads it."""


_WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "add_": lambda a, b: a.add_(b) if a.shape == b.shape else a.add_(0.25),
    "mul_": lambda a, b: a.mul_(0.5),
    "tanh_": lambda a, b: a.tanh_(),
    "copy_": lambda a, b: a.copy_(b) if a.shape == b.shape else a.copy_(a.clone() * 0.5),
    "zero_first": lambda a, b: a[:1].zero_(),
    "uniform_": lambda a, b: a.uniform_(),
    "scale_": lambda a, b: scale_(a, 0.5),
}


def draw_program(source: random.Random, length: int) -> list[Instruction]:
    """A random program."""
    operations = [*_NEW, *_WRITES]
    return [
        (source.choice(operations), source.randrange(64), source.randrange(64))
        for _ in range(length)
    ]


def run_program(
    program: Sequence[Instruction], x: torch.Tensor, buffer: torch.Tensor, group: str
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run a program on a copy of ``x`` and on ``buffer``, which it may write.

    Returns:
        A number made of all tensors, and the last tensors as they are: they may share memory.
    """
    pool = [x.detach().clone().flatten(1), buffer]
    for operation, first, second in program:
        a, b = pool[first % len(pool)], pool[second % len(pool)]
        if operation in _NEW:
            result = _NEW[operation](a, b, group)
            if result is not None:
                pool.append(result)
        else:
            _WRITES[operation](a, b)
    return torch.stack([tensor.mean() for tensor in pool]).mean().tanh(), pool[-2:]
