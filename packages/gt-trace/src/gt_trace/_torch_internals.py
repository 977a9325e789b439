"""The one place where this package touches PyTorch's private or unstable symbols.

Each has its reason beside it, so that a new PyTorch needs one edit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# Keeps torch-function modes out of what runs below the dispatcher, which would call them for every
# attribute of every tensor that fake tensors and DTensors look at.
from torch._C import DisableTorchFunction

# Marks a fake tensor as the conjugate or negative view that the traced one is; a fake tensor is
# made over a plain meta tensor, which loses both.
from torch._C import _set_conj as set_conj
from torch._C import _set_neg as set_neg

# The counter from which autograd nodes get the numbers that ``meta["seq_nr"]`` repeats.
from torch._C._autograd import _get_sequence_nr as sequence_counter

# Fake tensors stand in for parameters and inputs while tracing; no public constructor exists.
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# The engine patch gives backward nodes the sequence number of their forward node; the context
# is the permission that the patch asks for.
from torch.compiler import _non_strict_tracing_context as non_strict_tracing_context
from torch.compiler import _patch_engine_backward as patch_engine_backward

# make_fx with its recording options is the tracer itself; it has no public name. The proxy mode
# leads to the graph that is being made.
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

# What make_fx writes to ``meta["tensor_meta"]``.
from torch.fx.passes.shape_prop import TensorMetadata

# The tree functions of torch itself: the same registrations as every other torch tracer.
from torch.utils import _pytree as pytree

# Says whether a tensor subclass can be taken apart with __tensor_flatten__; and the base of modes
# that see every operator.
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

__all__ = [
    "DimDynamic",
    "DisableTorchFunction",
    "FakeTensor",
    "FakeTensorMode",
    "ShapeEnv",
    "StatelessSymbolicContext",
    "TensorMetadata",
    "TorchDispatchMode",
    "TracingContext",
    "concatenate_meshes",
    "get_proxy_mode",
    "is_traceable_wrapper_subclass",
    "make_fx",
    "non_strict_tracing_context",
    "patch_engine_backward",
    "pytree",
    "sequence_counter",
    "set_conj",
    "set_neg",
    "strided_shard",
    "tracing",
]


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return the mesh that spans several meshes of one root, as FSDP2 makes it; no public way."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh._concatenate(list(meshes))


def strided_shard(dim: int, *, split_factor: int) -> Placement:
    """Return FSDP2's placement of a dimension that tensor parallelism already splits."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)
