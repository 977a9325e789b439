"""Capture of whole PyTorch training steps as graphs, with annotations that survive.

``trace_step`` records forward, loss and backward of any ``nn.Module`` as one graph of plain
tensors; ``TracedStep.bind`` runs it on live parameters. Data parallelism as traceable collectives
is in ``gt_trace.fsdp``, multi-process test workers in ``gt_trace.testing``; neither is
imported here, so that a capture without them does not pay for ``torch.distributed``. Likewise
``export_joint_graph`` and ``partition``, a step as a forward and a backward graph for autograd, are
imported when they are first asked for: AOTAutograd takes seconds to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from gt_trace.annotate import (
    AnnotationHandle,
    annotate,
    annotate_method,
    annotate_modules,
    phase,
)
from gt_trace.capture.graph_inputs import ArgumentSignature, GraphInput
from gt_trace.capture.input_preparers import InputPreparer, TraceInputs
from gt_trace.capture.module_state import StateEntry
from gt_trace.capture.subclass_layout import TensorLayout, flatten_tensor, unflatten_tensor
from gt_trace.capture.trace import trace_step
from gt_trace.capture.traced_step import BoundStep, TracedStep
from gt_trace.errors import (
    CaptureError,
    ConstantCapturedError,
    GtTraceError,
    InputMismatchError,
    StateMismatchError,
)
from gt_trace.graph_text import collective_counts, graph_text
from gt_trace.node_metadata import (
    copy_annotations,
    is_backward,
    module_fqn,
    node_annotations,
    phase_of,
    read_annotation,
    remove_annotation,
    sequence_number,
    write_annotation,
)

if TYPE_CHECKING:
    from gt_trace.joint.bound_joint import BoundJoint, ForwardBackward
    from gt_trace.joint.joint_export import export_joint_graph
    from gt_trace.joint.joint_graph import GraphResult, JointGraph, OutputSignature
    from gt_trace.joint.joint_partition import partition
    from gt_trace.stamping import (
        StampedCapture,
        StampingError,
        StampReport,
        step_differences,
        trace_step_by_stamping,
    )

__version__ = "0.1.0"

__all__ = [
    "AnnotationHandle",
    "ArgumentSignature",
    "BoundJoint",
    "BoundStep",
    "CaptureError",
    "ConstantCapturedError",
    "ForwardBackward",
    "GraphInput",
    "GraphResult",
    "GtTraceError",
    "InputMismatchError",
    "InputPreparer",
    "JointGraph",
    "OutputSignature",
    "StampReport",
    "StampedCapture",
    "StampingError",
    "StateEntry",
    "StateMismatchError",
    "TensorLayout",
    "TraceInputs",
    "TracedStep",
    "annotate",
    "annotate_method",
    "annotate_modules",
    "collective_counts",
    "copy_annotations",
    "export_joint_graph",
    "flatten_tensor",
    "graph_text",
    "is_backward",
    "module_fqn",
    "node_annotations",
    "partition",
    "phase",
    "phase_of",
    "read_annotation",
    "remove_annotation",
    "sequence_number",
    "step_differences",
    "trace_step",
    "trace_step_by_stamping",
    "unflatten_tensor",
    "write_annotation",
]

_IMPORTED_LATE = {
    "BoundJoint": "joint.bound_joint",
    "ForwardBackward": "joint.bound_joint",
    "GraphResult": "joint.joint_graph",
    "JointGraph": "joint.joint_graph",
    "OutputSignature": "joint.joint_graph",
    "StampReport": "stamping",
    "StampedCapture": "stamping",
    "StampingError": "stamping",
    "export_joint_graph": "joint.joint_export",
    "partition": "joint.joint_partition",
    "step_differences": "stamping",
    "trace_step_by_stamping": "stamping",
}


def __getattr__(name: str) -> object:
    if name not in _IMPORTED_LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"gt_trace.{_IMPORTED_LATE[name]}"), name)
