"""Graphs of functions on a device that this machine need not have."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.traceback import preserve_node_meta


def capture_on(
    fn: Callable[..., object], *inputs: torch.Tensor, device: str = "cuda"
) -> GraphModule:
    """The graph of a function whose inputs are on a device, of which only their metadata exists.

    Args:
        fn: of plain tensors; may make sizes that depend on data.
        inputs: on meta for the device, or on CPU to stay there.
        device: for the inputs on meta.
    """
    shape_env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    with mode:
        fakes = [
            torch.empty_strided(
                tensor.shape,
                tensor.stride(),
                dtype=tensor.dtype,
                device=device if tensor.is_meta else tensor.device,
            )
            for tensor in inputs
        ]
    with preserve_node_meta(), mode:
        return make_fx(fn)(*fakes)
