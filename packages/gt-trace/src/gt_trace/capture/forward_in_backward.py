"""A forward that runs inside of a backward, to be differentiated there.

Backward nodes inherit annotations by autograd's numbers (``inherit``). In a backward ``make_fx``
numbers whatever it records after the autograd node that runs, so that what is recorded again there,
and its gradients, would not find each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx.traceback import get_current_meta

from gt_trace._torch_versions import same_marks_afterwards


@contextmanager
def forward_in_backward() -> Iterator[None]:
    """Inside, nodes are numbered and marked as of a forward; their phase has to be stated."""
    keys = ("in_grad_fn", "autograd_backward")
    with same_marks_afterwards(*keys):
        for key in keys:
            get_current_meta().pop(key, None)
        yield
