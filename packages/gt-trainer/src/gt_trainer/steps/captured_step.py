"""A training step as one graph: forward, loss, backward, gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from gt_config.graph_kinds import GraphKind
from gt_passes import PassContext
from gt_passes.ep_overlap import settle_chunk_annotations
from gt_trace import TracedStep, phase
from gt_trace.artifacts.encoded_document import DocumentForm
from gt_trace.artifacts.step_document import STEP_FORM
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
from gt_trainer.steps.training_step import (
    LossFunction,
    loss_of_batch,
    num_operators,
)


@dataclass(frozen=True, slots=True)
class WholeStepProgram(Program[TracedStep]):
    """A training step as one graph; see ``Program``."""

    form: ClassVar[DocumentForm[TracedStep]] = STEP_FORM
    graph_kinds: ClassVar[tuple[GraphKind, ...]] = ("STEP",)

    @property
    def graphs(self) -> tuple[ProgramGraph, ...]:
        """See ``Program``."""
        graph_module, context = self.captured.graph_module, PassContext.of_step(self.captured)
        return (ProgramGraph(graph_module=graph_module, kind="STEP", context=context),)

    @property
    def num_nodes_captured(self) -> int:
        """See ``Program``."""
        return num_operators(self.captured.graph_module)

    def text(self, report: CaptureReport[Any]) -> str:
        """See ``Program``."""
        num_nodes, num_passes = self.num_nodes_captured, len(report.passes[0].records)
        return f"the training step: {num_nodes:,} operators after {num_passes} passes"

    def check_fits(self, model: nn.Module) -> None:
        """See ``Program``."""
        self.captured.bind(model)


def whole_step(
    model: nn.Module, loss_fn: LossFunction, *args: Any, options: TracingOptions | None = None
) -> ProgramToCapture[WholeStepProgram]:
    """Return ``training_step`` as a program to capture.

    Args:
        model: Parallelized, on its device or on meta.
        loss_fn: torchtitan's loss.
        args: Example arguments of the function of ``training_step``.
        options: None for the defaults.
    """

    def trace(_: RunPasses) -> tuple[WholeStepProgram, CaptureLayersReport | None]:
        traced, stamping = trace_training_step(model, loss_fn, *args, options=options)
        return WholeStepProgram(traced), stamping

    return ProgramToCapture(
        program=WholeStepProgram,
        trace=trace,
        model=model,
        identified_by={"loss_fn": loss_fn, "arguments": args},
    )


def training_step(
    model: nn.Module, loss_fn: LossFunction
) -> Callable[..., tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]]:
    """Return forward, loss and backward as a function that returns the loss and the gradients.

    The gradients are those of ``[p for p in model.parameters() if p.requires_grad]``, in this
    order; None for a parameter that the loss does not depend on.
    """

    def step(
        inputs: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor,
        extra_kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        prediction = model(inputs, **extra_kwargs)
        with phase("loss"):
            loss = loss_of_batch(loss_fn, prediction, labels, global_valid_tokens, extra_kwargs)
        parameters = [p for p in model.parameters() if p.requires_grad]
        return loss, torch.autograd.grad(loss, parameters, allow_unused=True)

    return step


def trace_training_step(
    model: nn.Module,
    loss_fn: LossFunction,
    *args: Any,
    options: TracingOptions | None = None,
) -> tuple[TracedStep, CaptureLayersReport | None]:
    """Capture ``training_step`` and run no pass: see ``whole_step``.

    Returns:
        The step, and how its layers were stamped if that was asked for.

    Raises:
        ForwardChunkingError: A module cannot run in chunks; the model is left as it was.
        ChunkMetadataError: A module that was to run in chunks was not called.
    """
    options = options or TracingOptions()
    with (
        annotate_expert_regions(model),
        chunked_for_capture(model, options.ep_overlap) as chunked,
    ):
        reports: list[CaptureLayersReport] = []
        trace = partial(
            layer_tracer(options.capture_layers, reports.append),
            module=model,
            meta_device=options.meta_device,
            input_preparers=options.input_preparers,
        )
        traced = trace(training_step(model, loss_fn))(*args)
        roots = chunked.roots if chunked is not None else ()
        settle_chunk_annotations(traced.graph_module, roots=roots)
    return traced, reports[0] if reports else None
