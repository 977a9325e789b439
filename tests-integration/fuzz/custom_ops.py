"""Operators of which no pass knows anything: nothing may move across them.

``observe`` has an effect that its schema does not tell: it notes what it saw, and when. ``scale_``
writes to its argument, as its schema does tell.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

__all__ = ["observe", "observed", "scale_"]

observed: list[str] = []
"""Digests of what ``observe`` was called with in this process, in order."""


@torch.library.custom_op("pass_fuzz::observe", mutates_args=())
def observe(x: torch.Tensor) -> torch.Tensor:
    """Note ``x`` in ``observed``; returns a copy."""
    # The state of the generator belongs to what an unknown operator may depend on.
    seen = hashlib.sha1(x.detach().contiguous().view(torch.uint8).numpy().tobytes())
    seen.update(torch.get_rng_state().numpy().tobytes())
    observed.append(seen.hexdigest()[:12])
    return x.clone()


@observe.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _observe_gradient(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = observe(gradient.contiguous())
    return result


observe.register_autograd(_observe_gradient)


@torch.library.custom_op("pass_fuzz::scale_", mutates_args=("x",))
def scale_(x: torch.Tensor, factor: float) -> None:
    """Multiply ``x`` in place."""
    x.mul_(factor)
