"""The microbatches of a step that gather parameters and reduce gradients once for all of them.

Forward, loss and backward of one microbatch are captured, and cut into up to three graphs: of the
first microbatch, which gathers, of those between, and of the last, which reduces
(``gt_pipeline.graph.cut_accumulation``; docs/decisions/0024-reduce-once.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from gt_config.graph_kinds import GraphKind
from gt_passes import PassContext
from gt_pipeline.graph import (
    MICROBATCHES_FORM,
    AccumulationGraphs,
    cut_accumulation,
)
from gt_trace.artifacts.encoded_document import DocumentForm
from gt_trace.capture.bound_inputs import BoundInputs
from gt_trainer.steps.captured_step import trace_training_step
from gt_trainer.steps.layer_tracer import CaptureLayersReport
from gt_trainer.steps.program import (
    CaptureReport,
    Program,
    ProgramGraph,
    ProgramToCapture,
    RunPasses,
    TracingOptions,
)
from gt_trainer.steps.training_step import LossFunction, num_operators


@dataclass(frozen=True, slots=True)
class MicrobatchProgram(Program[AccumulationGraphs]):
    """Up to three graphs for the microbatches of a step; see ``Program``."""

    form: ClassVar[DocumentForm[AccumulationGraphs]] = MICROBATCHES_FORM
    graph_kinds: ClassVar[tuple[GraphKind, ...]] = ("MICROBATCH",)
    decoding_verifies: ClassVar[bool] = True

    @property
    def graphs(self) -> tuple[ProgramGraph, ...]:
        """See ``Program``."""
        fake_mode = self.captured.traced.fake_mode
        return tuple(
            ProgramGraph(
                graph_module=each.graph_module,
                kind="MICROBATCH",
                context=PassContext(
                    fake_mode=fake_mode, static_input_names=each.static_input_names
                ),
                released_inputs=each.released_inputs,
                input_kinds=each.input_kinds,
                is_repeated=each.role == "further",
            )
            for each in self.captured.graphs
        )

    @property
    def num_nodes_captured(self) -> int:
        """See ``Program``."""
        return num_operators(self.captured.traced.graph_module)

    def text(self, report: CaptureReport[Any]) -> str:
        """See ``Program``."""
        counts = ", ".join(
            f"{each.role} {num_operators(each.graph_module):,}" for each in self.captured.graphs
        )
        num_microbatches, num_passes = self.captured.num_microbatches, len(report.passes[0].records)
        return (
            f"the microbatches of a training step, {num_microbatches} of them; operators "
            f"after {num_passes} passes: {counts}"
        )

    def check_fits(self, model: nn.Module) -> None:
        """See ``Program``."""
        BoundInputs(self.captured.traced, model)


def microbatches(
    model: nn.Module,
    loss_fn: LossFunction,
    *args: Any,
    num_microbatches: int,
    options: TracingOptions | None = None,
) -> ProgramToCapture[MicrobatchProgram]:
    """Return the microbatches of a step as a program to capture.

    Args:
        model: As for ``whole_step``.
        loss_fn: As for ``whole_step``.
        args: Example arguments of one microbatch.
        num_microbatches: Number in a step, two or more.
        options: None for the defaults.
    """
    options = options or TracingOptions()

    def trace(_: RunPasses) -> tuple[MicrobatchProgram, CaptureLayersReport | None]:
        traced, stamping = trace_training_step(model, loss_fn, *args, options=options)
        cut = cut_accumulation(
            traced, num_results=1, num_microbatches=num_microbatches, verify=options.verify
        )
        return MicrobatchProgram(cut), stamping

    return ProgramToCapture(
        program=MicrobatchProgram,
        trace=trace,
        model=model,
        identified_by={
            "loss_fn": loss_fn,
            "arguments": args,
            "num_microbatches": num_microbatches,
        },
    )
