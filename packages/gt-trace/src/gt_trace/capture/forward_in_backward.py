"""A forward that runs inside of a backward, to be differentiated there.

Backward nodes inherit annotations by autograd's numbers (``inherit``). In a backward ``make_fx``
numbers whatever it records after the autograd node that runs, so that what is recorded again there,
and its gradients, would not find each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx.traceback import get_current_meta


@contextmanager
def forward_in_backward() -> Iterator[None]:
    """Inside, nodes are numbered and marked as of a forward; their phase has to be stated."""
    current = get_current_meta()
    keys = ("in_grad_fn", "autograd_backward")
    outside: dict[str, Any] = {key: current[key] for key in keys if key in current}
    for key in outside:
        del current[key]
    try:
        yield
    finally:
        current.update(outside)
