"""A pipeline stage as graphs, one for each action of a schedule.

Passes that need forward and backward together run on the stage's joint graph, before it is cut
(``gt_pipeline.graph.cut_stage``): chunks, their order, and recomputation. The others run on the
graphs of actions, as passes declare it: buckets in those that gather parameters and reduce
gradients, compilation in those that compute. A schedule puts the actions in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from gt_config.graph_kinds import PIPELINE_ACTIONS, GraphKind
from gt_passes import PassContext
from gt_passes.ep_overlap import settle_chunk_annotations
from gt_pipeline.graph import (
    STAGE_FORM,
    RewrittenStage,
    capture_stage,
    cut_stage,
)
from gt_pipeline.graph.stage_inputs import StageState
from gt_trace.artifacts.encoded_document import DocumentForm
from gt_trainer.artifacts.stage_names import StageNames
from gt_trainer.decoder.eager_chunks import chunked_for_capture
from gt_trainer.decoder.expert_regions import annotate_expert_regions
from gt_trainer.steps.layer_tracer import CaptureLayersReport, layer_tracer
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
class StageProgram(Program[RewrittenStage]):
    """The graphs of a stage's actions; see ``Program``."""

    form: ClassVar[DocumentForm[RewrittenStage]] = STAGE_FORM
    graph_kinds: ClassVar[tuple[GraphKind, ...]] = ("STAGE", *PIPELINE_ACTIONS)
    kinds_before_cut: ClassVar[tuple[GraphKind, ...]] = ("STAGE",)
    decoding_verifies: ClassVar[bool] = True

    @property
    def graphs(self) -> tuple[ProgramGraph, ...]:
        """See ``Program``; those that compute something."""
        fake_mode = self.captured.graphs.capture.traced.fake_mode
        return tuple(
            ProgramGraph(
                graph_module=self.captured.actions[cut.kind].graph_module,
                kind=cut.kind,
                context=PassContext(
                    fake_mode=fake_mode,
                    static_input_names=tuple(slot.name for slot in cut.static_inputs),
                ),
            )
            for cut in self.captured.graphs
            if not cut.is_empty
        )

    @property
    def num_nodes_captured(self) -> int:
        """See ``Program``."""
        return num_operators(self.captured.graphs.capture.traced.graph_module)

    def text(self, report: CaptureReport[Any]) -> str:
        """See ``Program``."""
        actions, stamping = self.captured.actions.values(), report.stamping
        counts = ", ".join(f"{a.kind} {num_operators(a.graph_module):,}" for a in actions)
        capture = self.captured.graphs.capture
        how = f" ({stamping})" if stamping and stamping.stamped else ""
        return (
            f"stage {capture.stage_index} of {capture.num_stages}{how}; "
            f"operators of its actions after passes: {counts}"
        )

    def check_fits(self, model: nn.Module) -> None:
        """See ``Program``."""
        StageState(self.captured.graphs.capture, model)


def stage_program(
    part: nn.Module,
    captured_with: Mapping[str, Any],
    *,
    loss_fn: LossFunction,
    num_microbatches: int,
    num_live_microbatches: int,
    options: TracingOptions,
    fake_mode: Any = None,
) -> ProgramToCapture[StageProgram]:
    """Return a pipeline stage as a program to capture.

    Args:
        part: The part of the model that is the stage, parallelized and in training mode; may be on
            meta.
        captured_with: Arguments of ``capture_stage``, with ``inputs`` as every rank is given them.
        loss_fn: torchtitan's loss, which the last stage has inside.
        num_microbatches: Number in one run of the schedule.
        num_live_microbatches: Number that hold at once what their forwards saved.
        options: As for the other programs.
        fake_mode: The fake mode of the stages of this rank that were captured before.
    """

    def trace(run_passes: RunPasses) -> tuple[StageProgram, CaptureLayersReport | None]:
        stamped: list[CaptureLayersReport] = []
        with (
            annotate_expert_regions(part),
            chunked_for_capture(part, options.ep_overlap, is_stage=True) as chunked,
        ):
            capture = capture_stage(
                part,
                trace=layer_tracer(options.capture_layers, stamped.append),
                fake_mode=fake_mode,
                verify=options.verify,
                **captured_with,
            )
            traced = capture.traced
            roots = chunked.roots if chunked is not None else ()
            settle_chunk_annotations(traced.graph_module, roots=roots)
            static_inputs = traced.inputs[: traced.num_static_inputs]
            context = PassContext(
                fake_mode=traced.fake_mode,
                static_input_names=tuple(each.name for each in static_inputs),
                num_live_microbatches=num_live_microbatches,
            )
            run_passes(
                ProgramGraph(graph_module=traced.graph_module, kind="STAGE", context=context)
            )
            rewritten = RewrittenStage.of(cut_stage(capture, verify=options.verify))
        # The forward was traced before, and is stamped last with the backward.
        return StageProgram(rewritten), stamped[-1] if stamped else None

    index, num_stages = captured_with["stage_index"], captured_with["num_stages"]
    microbatch, is_last = captured_with["inputs"], captured_with["loss_fn"] is not None
    facts = {"num_stages": num_stages, "num_live_microbatches": num_live_microbatches}
    taken = (  # by this stage, of what the rank is given for any of its stages
        microbatch.args if index == 0 else (),
        dict(microbatch.kwargs),
        microbatch.target if is_last else None,
    )
    return ProgramToCapture(
        program=StageProgram,
        trace=trace,
        model=part,
        identified_by={
            "loss_fn": loss_fn if is_last else None,
            "arguments": (facts, captured_with["activations"], *taken),
            "num_microbatches": num_microbatches,
        },
        stage=StageNames.of(part, stage_index=index, num_stages=num_stages),
        fake_mode=fake_mode,
    )
