"""The private PyTorch symbols behind stage graphs, in one place, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Fake tensors stand in for parameters and microbatches while a stage is captured; stages whose
# graphs are joined share one mode. There is no public name.
from torch._subclasses.fake_tensor import FakeTensorMode

# The tree functions of torch itself: the same registrations as every other torch tracer.
from torch.utils import _pytree as pytree

__all__ = [
    "FakeTensorMode",
    "add_in_place",
    "copy_all",
    "fill_with_nothing",
    "pytree",
]


def add_in_place(sums: list[Tensor], terms: Sequence[Tensor]) -> None:
    """Add each term to its sum. One call for all: torch has no public name for it."""
    torch._foreach_add_(sums, list(terms))


def copy_all(targets: list[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target. One call for all: torch has no public name for it."""
    torch._foreach_copy_(targets, list(sources), non_blocking=True)


def fill_with_nothing(sums: list[Tensor]) -> None:
    """Make each what added to a term gives that term, in every bit: the zero that is negative."""
    torch._foreach_zero_(sums)
    torch._foreach_neg_(sums)
