"""A model's forward as two captured graphs, inside torchtitan's autograd loop (``aot_joint``).

What is captured is the model as it is called: forward and backward of everything up to its output.
The loss stays outside, and with the chunked loss the output projection too, since the loss applies
it piece by piece (``decoder/chunked_loss.py``). Both, and ``loss.backward()``, run eagerly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from gt_config.graph_kinds import GraphKind
from gt_passes import PassContext
from gt_trace.artifacts.encoded_document import DocumentForm
from gt_trace.artifacts.joint_document import JOINT_FORM
from gt_trace.capture.bound_inputs import BoundInputs
from gt_trace.joint import ForwardBackward, export_joint_graph, partition
from gt_trainer.decoder.expert_regions import annotate_expert_regions
from gt_trainer.steps.prepared_inputs import for_model_calls
from gt_trainer.steps.program import (
    CaptureReport,
    Program,
    ProgramGraph,
    ProgramToCapture,
    RunPasses,
    TracingOptions,
)
from gt_trainer.steps.training_step import num_operators


@dataclass(frozen=True, slots=True)
class JointProgram(Program[ForwardBackward]):
    """The forward and the backward graph of a model; see ``Program``."""

    form: ClassVar[DocumentForm[ForwardBackward]] = JOINT_FORM
    graph_kinds: ClassVar[tuple[GraphKind, ...]] = ("JOINT_FORWARD", "JOINT_BACKWARD")

    @property
    def graphs(self) -> tuple[ProgramGraph, ...]:
        """See ``Program``."""
        parts, fake_mode = self.captured, self.captured.joint.fake_mode
        forward = PassContext(fake_mode=fake_mode, static_input_names=parts.static_input_names)
        backward = PassContext(fake_mode=fake_mode)
        return (
            ProgramGraph(graph_module=parts.forward, kind="JOINT_FORWARD", context=forward),
            ProgramGraph(graph_module=parts.backward, kind="JOINT_BACKWARD", context=backward),
        )

    @property
    def num_nodes_captured(self) -> int:
        """See ``Program``."""
        return num_operators(self.captured.joint.graph_module)

    def text(self, report: CaptureReport[Any]) -> str:
        """See ``Program``."""
        forward, backward = map(num_operators, (self.captured.forward, self.captured.backward))
        return (
            f"the model: {forward:,} operators forward and {backward:,} backward after "
            f"{len(report.passes[0].records)} and {len(report.passes[1].records)} passes"
        )

    def check_fits(self, model: nn.Module) -> None:
        """See ``Program``."""
        BoundInputs(self.captured.joint, model)


def joint_program(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    options: TracingOptions | None = None,
) -> ProgramToCapture[JointProgram]:
    """Return a call of a model as a program to capture.

    Args:
        model: As for ``whole_step``, in training mode.
        args: Example arguments.
        kwargs: Example keyword arguments.
        options: None for the defaults.
    """
    options = options or TracingOptions()

    def trace(_: RunPasses) -> tuple[JointProgram, None]:
        with annotate_expert_regions(model):
            joint = export_joint_graph(
                model,
                args,
                dict(kwargs),
                meta_device=options.meta_device,
                input_preparers=for_model_calls(options.input_preparers),
            )
            parts = partition(joint, partitioner=options.joint_partitioner)
        return JointProgram(parts), None

    return ProgramToCapture(
        program=JointProgram,
        trace=trace,
        model=model,
        # The loss stays outside.
        identified_by={"loss_fn": None, "arguments": (args, dict(kwargs))},
    )
