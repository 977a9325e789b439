"""Values for samples of operators: small integers, so that sums in any order are exact.

Sizes are multiples of 4 where they can be, so that two mesh axes of 2 may cut one dim; some are 2,
so that pieces of size 1 occur.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from simulated_ranks import Sample

_GENERATOR = torch.Generator().manual_seed(0)


def ints(
    *shape: int, low: int = -4, high: int = 5, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Small integers as floats."""
    return torch.randint(low, high, shape, generator=_GENERATOR).to(dtype)


def ids(*shape: int, below: int) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=_GENERATOR)


def bools(*shape: int) -> torch.Tensor:
    return torch.randint(0, 2, shape, generator=_GENERATOR).bool()


def positive(*shape: int) -> torch.Tensor:
    return ints(*shape, low=1, high=6)


def complexes(*shape: int) -> torch.Tensor:
    return torch.complex(ints(*shape), ints(*shape))


def distinct(*shape: int) -> torch.Tensor:
    """No two equal: what sorts them has one answer."""
    order = torch.randperm(math.prod(shape), generator=_GENERATOR)
    return order.reshape(shape).double()


def call(
    operator: str,
    *args: Any,
    exact: bool = True,
    compared: tuple[int, ...] | None = None,
    stand_in: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Sample:
    name = operator if operator.count(".") == 1 else f"{operator}.default"
    return Sample(
        operator=f"aten.{name}",
        args=args,
        kwargs=kwargs,
        exact=exact,
        compared=compared,
        stand_in=stand_in,
    )


def close(operator: str, *args: Any, **kwargs: Any) -> Sample:
    return call(operator, *args, exact=False, **kwargs)
