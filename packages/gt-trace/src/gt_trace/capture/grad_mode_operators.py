"""Operators whose kernels read whether autograd is enabled, with that as their first argument.

On CPU the kernel of ``nn.LSTM`` keeps what its backward needs, and rounds otherwise, if autograd is
enabled. A graph runs without autograd, and one step may call the kernel both ways. So a trace
records these operators instead, with the grad mode in which the step called each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gt_trace._torch_internals import OpOverload, below_autograd

_NAMES = ("mkldnn_rnn_layer", "_sparse_mm_reduce_impl")
"""Found by running the samples of all operators of PyTorch's own tests with autograd enabled and
disabled."""

_library = torch.library.Library("gt_trace", "DEF")  # type: ignore[no-untyped-call]  # torch's


def _recorded_form(name: str) -> Callable[..., Any]:
    """Define the operator that a graph calls, and return the function that a trace runs."""
    operator: OpOverload = getattr(torch.ops.aten, name).default
    schema = str(operator._schema).removeprefix("aten::")
    _library.define(  # type: ignore[no-untyped-call]  # torch's
        schema.replace("(", "(bool grad_mode, ", 1)
    )

    def kernel(grad_mode: bool, *operands: Any) -> Any:
        with torch.set_grad_enabled(grad_mode), below_autograd():
            return operator(*operands)

    torch.library.impl(_library, name, "CompositeExplicitAutograd")(kernel)
    torch.library.register_fake(
        f"gt_trace::{name}", lambda _, *operands: operator(*operands), lib=_library
    )
    recorded: OpOverload = getattr(torch.ops.gt_trace, name).default
    return lambda *operands: recorded(torch.is_grad_enabled(), *operands)


WITH_GRAD_MODE: dict[OpOverload, Callable[..., Any]] = {
    getattr(torch.ops.aten, name).default: _recorded_form(name)
    for name in _NAMES
    if hasattr(torch.ops.aten, name)
}
"""A decomposition table for traces."""
