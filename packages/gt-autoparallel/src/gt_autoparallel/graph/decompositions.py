"""Operators that can be sharded only as two: what capture replaces them by.

A mean over samples divides by the weight of all samples. As one operator it needs every sample on
every rank; as a sum and a division, each rank sums its own samples, and two numbers are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from gt_autoparallel._torch_internals import OpOverload

_MEAN, _SUM = 1, 2
"""Values of the argument ``reduction``."""

_NLL_LOSS = torch.ops.aten.nll_loss_forward.default


def is_decomposed(target: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator with these arguments has a decomposition here."""
    return target is _NLL_LOSS and args[3] == _MEAN


def _mean_nll_loss(
    log_probabilities: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
) -> Any:
    """The sum over samples, divided by their weight: what the operator computes itself."""
    if reduction != _MEAN:
        return NotImplemented
    total, total_weight = _NLL_LOSS(log_probabilities, target, weight, _SUM, ignore_index)
    return torch.ops.aten.div.Tensor(total, total_weight), total_weight


DECOMPOSITIONS: Mapping[OpOverload, Callable[..., Any]] = MappingProxyType(
    {_NLL_LOSS: _mean_nll_loss}
)
"""Decompositions as ``make_fx`` takes them: NotImplemented leaves the operator as it is."""
