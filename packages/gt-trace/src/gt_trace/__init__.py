"""Capture of whole PyTorch training steps as graphs, with annotations that survive.

``trace_step`` records forward, loss and backward of any ``nn.Module`` as one graph of plain
tensors; ``TracedStep.bind`` runs it on live parameters. Apart from it, so that a capture does not
pay for their imports: ``gt_trace.joint`` (a step as a forward and a backward graph for autograd),
``gt_trace.stamping`` (capture that hardly depends on depth), ``gt_trace.fsdp`` (data parallelism as
traceable collectives) and ``gt_trace.testing`` (multi-process test workers).
"""

from __future__ import annotations

from gt_trace._torch_internals import flex_attention_on_cpu
from gt_trace.annotate import (
    AnnotationHandle,
    annotate,
    annotate_method,
    phase,
)
from gt_trace.artifacts.save_step import load, save
from gt_trace.boxed_code import BoxedFunction, boxed
from gt_trace.capture.argument_structure import structure_differences
from gt_trace.capture.block_masks import register_block_masks
from gt_trace.capture.copied_calls import calls_of_one_place, traced_call
from gt_trace.capture.graph_inputs import ArgumentSignature, GraphInput
from gt_trace.capture.input_preparers import InputPreparer, TraceInputs
from gt_trace.capture.subclass_layout import TensorLayout, flatten_tensor, unflatten_tensor
from gt_trace.capture.trace import trace_step
from gt_trace.capture.traced_step import BoundStep, TracedStep
from gt_trace.errors import (
    ArtifactDamagedError,
    ArtifactError,
    ArtifactVersionError,
    CaptureError,
    ConstantCapturedError,
    InputMismatchError,
    StateMismatchError,
)
from gt_trace.graph_text import collective_counts, graph_text
from gt_trace.node_metadata import (
    module_fqn,
    phase_of,
    read_annotation,
    write_annotation,
)

__version__ = "0.1.0"

__all__ = [
    "AnnotationHandle",
    "ArgumentSignature",
    "ArtifactDamagedError",
    "ArtifactError",
    "ArtifactVersionError",
    "BoundStep",
    "BoxedFunction",
    "CaptureError",
    "ConstantCapturedError",
    "GraphInput",
    "InputMismatchError",
    "InputPreparer",
    "StateMismatchError",
    "TensorLayout",
    "TraceInputs",
    "TracedStep",
    "annotate",
    "annotate_method",
    "boxed",
    "calls_of_one_place",
    "collective_counts",
    "flatten_tensor",
    "flex_attention_on_cpu",
    "graph_text",
    "load",
    "module_fqn",
    "phase",
    "phase_of",
    "read_annotation",
    "register_block_masks",
    "save",
    "structure_differences",
    "trace_step",
    "traced_call",
    "unflatten_tensor",
    "write_annotation",
]
