"""The capture of a model as two graphs: made here, or stored and loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from gt_config import JointPartitioner
from gt_config.graph_kinds import GraphKind
from gt_passes import (
    PassContext,
    PassManager,
    PassManagerReport,
    pass_report_as_data,
    pass_report_from_data,
)
from gt_trace import InputPreparer
from gt_trace.artifacts.container import Container
from gt_trace.artifacts.joint_document import decode_joint, encode_joint
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.capture.bound_inputs import BoundInputs
from gt_trace.errors import ArtifactError
from gt_trace.joint import ForwardBackward, export_joint_graph, partition
from gt_trainer.artifacts.storable_graph import STEP_SECTION, StoredGraph
from gt_trainer.decoder.expert_regions import annotate_expert_regions
from gt_trainer.startup import StartupClock
from gt_trainer.steps.captured_step import Recipe
from gt_trainer.steps.prepared_inputs import for_model_calls
from gt_trainer.steps.training_step import num_operators

_PASSES = "passes"


@dataclass(frozen=True, slots=True, kw_only=True)
class JointCaptureReport:
    """What a capture produced, for the log."""

    parts: ForwardBackward
    passes: tuple[PassManagerReport, PassManagerReport]
    """What they did to the forward graph and to the backward graph."""

    is_loaded: bool = False
    """Whether the graphs were captured by another rank or run, and stored."""

    def __str__(self) -> str:
        """One line: the operators that run, and the passes that made them."""
        verb = "Loaded" if self.is_loaded else "Captured"
        return (
            f"{verb} the model: {self.num_nodes_forward:,} operators forward and "
            f"{self.num_nodes_backward:,} backward after {len(self.passes[0].records)} and "
            f"{len(self.passes[1].records)} passes"
        )

    def memory_text(self) -> None:
        """No graph has both the forward and the backward."""

    @property
    def graph_modules(self) -> tuple[GraphModule, ...]:
        """The graphs that run, after passes."""
        return (self.parts.forward, self.parts.backward)

    @property
    def num_nodes_forward(self) -> int:
        """Operators in the forward graph that runs."""
        return num_operators(self.parts.forward)

    @property
    def num_nodes_backward(self) -> int:
        """Operators in the backward graph that runs."""
        return num_operators(self.parts.backward)


def capture_joint(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    partitioner: JointPartitioner,
    recipe: Recipe,
    clock: StartupClock,
    until_code: bool = False,
    meta_device: torch.device | str = "meta",
    input_preparers: Sequence[InputPreparer] = (),
) -> JointCaptureReport:
    """Export the joint graph of a call of ``model``, cut it, and run the passes on both parts.

    Args:
        model: parallelized, on its device or on meta.
        args: example arguments.
        kwargs: likewise.
        partitioner: how the joint graph is cut.
        recipe: builds the passes, once for each part.
        clock: counts capture and passes as parts of the start-up.
        until_code: whether to leave out the passes that generate code, and those behind them.
        meta_device: the device for which a model on meta is captured.
        input_preparers: hooks on the arguments of ``training_step``.
    """
    with clock.part("capture"), annotate_expert_regions(model):
        joint = export_joint_graph(
            model,
            args,
            kwargs,
            meta_device=meta_device,
            input_preparers=for_model_calls(input_preparers),
        )
        parts = partition(joint, partitioner=partitioner)
    with clock.part("passes"):
        forward, backward = (recipe(*each) for each in contexts_of(parts))
        runs = [m.run_before_code if until_code else m.run for m in (forward, backward)]
        return JointCaptureReport(
            parts=parts, passes=(runs[0](parts.forward), runs[1](parts.backward))
        )


def contexts_of(parts: ForwardBackward) -> tuple[tuple[PassContext, GraphKind], ...]:
    """What passes need to know of the forward graph, and of the backward graph."""
    fake_mode = parts.joint.fake_mode
    forward = PassContext(fake_mode=fake_mode, static_input_names=parts.static_input_names)
    return (forward, "JOINT_FORWARD"), (PassContext(fake_mode=fake_mode), "JOINT_BACKWARD")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJoint:
    """The two graphs of a model behind their passes; see ``StorableGraph``."""

    trace: Callable[[], JointCaptureReport]
    """Captures, and runs the passes that generate no code."""

    model: nn.Module
    axes: MeshAxes
    clock: StartupClock
    kind = "joint graph"

    def capture(self) -> JointCaptureReport:
        """See ``StorableGraph``."""
        return self.trace()

    def encode(self, captured: JointCaptureReport) -> StoredGraph:
        """See ``StorableGraph``."""
        encoded = encode_joint(captured.parts, self.axes)
        return StoredGraph(
            step=encoded.document,
            documents={_PASSES: [pass_report_as_data(each) for each in captured.passes]},
            blobs=encoded.blobs,
        )

    def decode(self, container: Container) -> JointCaptureReport:
        """See ``StorableGraph``."""
        with self.clock.part("load"):
            reports = container.document(_PASSES)
            if not isinstance(reports, list) or len(reports) != 2:
                raise ArtifactError("a joint graph has two reports of passes")
            document = container.document(STEP_SECTION)
            parts = decode_joint(document, self.axes, blob=container.blob)
            BoundInputs(parts.joint, self.model)
            forward, backward = map(pass_report_from_data, reports)
            return JointCaptureReport(parts=parts, passes=(forward, backward), is_loaded=True)

    def verified(self, captured: JointCaptureReport) -> JointCaptureReport:
        """See ``StorableGraph``."""
        parts, earlier = captured.parts, captured.passes
        with self.clock.part("load"):
            forward, backward = (PassManager((), context=each) for each, _ in contexts_of(parts))
            passes = (
                earlier[0].followed_by(forward.run(parts.forward)),
                earlier[1].followed_by(backward.run(parts.backward)),
            )
            return replace(captured, passes=passes)
