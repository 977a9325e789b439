"""The private symbols of PyTorch behind the joint graph, each with its reason.

Apart from ``_torch_internals``, because importing AOTAutograd takes seconds that a capture with
``trace_step`` need not pay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# The joint graph of AOTAutograd, and the descriptors that say what its values stand for; no public
# name exists.
from torch._functorch._aot_autograd import graph_capture
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    TangentAOTInput,
)
from torch._functorch._aot_autograd.schemas import (
    JointWithDescriptors,
    OutputType,
    PlainTensorMeta,
    SubclassCreationMeta,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

# The two ways to cut a joint graph; torch.compile uses them, no public name exists.
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

# While AOTAutograd traces, a DTensor's mesh is a stand-in; the real one is behind it.
from torch._library.fake_class_registry import FakeScriptObject

# A gradient that autograd hands over may still be under way.
from torch.distributed._functional_collectives import AsyncCollectiveTensor

# Holds the flag that says whether FX traces.
from torch.fx import _symbolic_trace

from gt_trace._torch_internals import inlined_compilation

_COPY = "copy_fwd_metadata_to_bw_nodes"

_TRACES = "_is_fx_tracing_flag"
"""A module global by which torch 2.13 knows that FX traces; later versions lack it."""


@contextmanager
def own_backward_annotations() -> Iterator[None]:
    """Backward nodes keep the annotations that they were traced with.

    AOTAutograd copies those of the forward node over them, so that a gradient's reduction would be
    annotated as the gathering of its parameter. There is no switch; ``inherit_annotations`` does
    the same without losing what a backward node says of itself.

    Raises:
        RuntimeError: this version of torch copies them in another place.
    """
    module: Any = graph_capture
    original = getattr(module, _COPY, None)
    if original is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no {module.__name__}.{_COPY}: which annotations its "
            "joint graphs carry is not known; use torch 2.11 to 2.15"
        )
    setattr(module, _COPY, lambda _graph: None)
    try:
        yield
    finally:
        setattr(module, _COPY, original)


_OTHER_KERNELS = (
    torch.ops.aten.upsample_linear1d.vec,
    torch.ops.aten.upsample_bilinear2d.vec,
    torch.ops.aten.upsample_trilinear3d.vec,
    torch.ops.aten.upsample_bilinear2d.default,
    torch.ops.aten.upsample_bicubic2d.default,
    torch.ops.aten.upsample_bicubic2d.vec,
    torch.ops.aten.lstm.input,
    torch.ops.aten.lstm.data,
)
"""Operators that AOTAutograd decomposes in Python to others than eager runs; last bits differ."""


@contextmanager
def eager_kernels() -> Iterator[None]:
    """Trace the kernels that eager execution calls, where AOTAutograd would decompose to others."""
    removed: list[tuple[Any, Any, Any]] = []
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    for operator in _OTHER_KERNELS:
        # ``py_kernels`` is what ``OpOverload.py_impl`` fills; no public name exists.
        removed += [
            (operator, key, operator.py_kernels.pop(key))
            for key in keys
            if key in operator.py_kernels
        ]
        operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, key, kernel in removed:
            operator.py_kernels[key] = kernel
        for operator in _OTHER_KERNELS:
            operator._dispatch_cache.clear()


@contextmanager
def inlined_joint_compilation() -> Iterator[None]:
    """``inlined_compilation``, also where AOTAutograd runs a module before it traces it.

    There torch 2.13 compiles what ``torch.compile`` made, which fails on tensors without data; 2.14
    and 2.15 run it as it was. Whether FX traces is what decides, and no public name says that it
    does.
    """
    module: Any = _symbolic_trace
    with inlined_compilation():
        if not hasattr(module, _TRACES):
            yield
            return
        before = getattr(module, _TRACES)
        setattr(module, _TRACES, True)
        try:
            yield
        finally:
            setattr(module, _TRACES, before)
