"""Capture of whole PyTorch training steps as graphs, with annotations that survive.

``trace_step`` records forward, loss and backward of any ``nn.Module`` as one graph of plain
tensors; ``TracedStep.bind`` runs it on live parameters. Data parallelism as traceable collectives
is in ``gt_trace.simple_fsdp``, multi-process test workers in ``gt_trace.testing``; neither is
imported here, so that a capture without them does not pay for ``torch.distributed``.
"""

from gt_trace.annotate import (
    AnnotationHandle,
    annotate,
    annotate_method,
    annotate_modules,
    phase,
)
from gt_trace.errors import (
    CaptureError,
    ConstantCapturedError,
    GtTraceError,
    InputMismatchError,
    StateMismatchError,
)
from gt_trace.graph_inputs import ArgumentSignature, GraphInput
from gt_trace.graph_text import collective_counts, graph_text
from gt_trace.input_preparers import InputPreparer, TraceInputs
from gt_trace.module_state import StateEntry
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
from gt_trace.subclass_layout import TensorLayout, flatten_tensor, unflatten_tensor
from gt_trace.trace import trace_step
from gt_trace.traced_step import BoundStep, TracedStep

__version__ = "0.1.0"

__all__ = [
    "AnnotationHandle",
    "ArgumentSignature",
    "BoundStep",
    "CaptureError",
    "ConstantCapturedError",
    "GraphInput",
    "GtTraceError",
    "InputMismatchError",
    "InputPreparer",
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
    "flatten_tensor",
    "graph_text",
    "is_backward",
    "module_fqn",
    "node_annotations",
    "phase",
    "phase_of",
    "read_annotation",
    "remove_annotation",
    "sequence_number",
    "trace_step",
    "unflatten_tensor",
    "write_annotation",
]
