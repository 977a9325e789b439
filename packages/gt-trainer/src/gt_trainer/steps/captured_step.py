"""A training step captured as one graph, with the passes that run on it, and what they did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from gt_config import CaptureLayers, EpOverlapConfig
from gt_config.graph_kinds import GraphKind
from gt_passes import (
    PassContext,
    PassManager,
    PassManagerReport,
    estimate_memory,
    residency_table,
)
from gt_passes.ep_overlap import settle_chunk_annotations
from gt_trace import InputPreparer, TracedStep, phase
from gt_trainer.decoder.eager_chunks import chunked_for_capture
from gt_trainer.decoder.expert_regions import annotate_expert_regions
from gt_trainer.startup import StartupClock
from gt_trainer.steps.layer_tracer import CaptureLayersReport, layer_tracer
from gt_trainer.steps.training_step import (
    LossFunction,
    loss_of_batch,
    num_operators,
)

Recipe = Callable[[PassContext, GraphKind], PassManager]
"""Builds the passes for one captured graph, of the kind given."""


def remembering(recipe: Recipe) -> tuple[Recipe, list[PassManager]]:
    """A recipe, and the managers that it will have built, in order.

    A manager that has run the passes before code is generated runs the others later.
    """
    managers: list[PassManager] = []

    def build(context: PassContext, graph: GraphKind) -> PassManager:
        managers.append(recipe(context, graph))
        return managers[-1]

    return build, managers


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """What a capture produced, for the log."""

    traced: TracedStep
    passes: tuple[PassManagerReport]
    """What they did to the one graph."""

    stamping: CaptureLayersReport | None = None
    """How layers were stamped, or why not; None if that was not asked for, or not done here."""

    is_loaded: bool = False
    """Whether the graph was captured by another rank or run, and stored."""

    def __str__(self) -> str:
        """One line: the operators that run, and the passes that made them."""
        verb = "Loaded" if self.is_loaded else "Captured"
        return (
            f"{verb} the training step: {self.num_nodes:,} operators after "
            f"{len(self.passes[0].records)} passes"
        )

    @property
    def graph_modules(self) -> tuple[GraphModule, ...]:
        """The graphs that run, after passes."""
        return (self.traced.graph_module,)

    @property
    def num_nodes_captured(self) -> int:
        """Operators in the graph as captured, before passes."""
        records = self.passes[0].records
        return records[0].before.num_ops if records else self.num_nodes

    @property
    def num_nodes(self) -> int:
        """Operators in the graph that runs, after passes."""
        return num_operators(self.traced.graph_module)

    def memory_text(self) -> str:
        """What is kept for the backward, and the estimated memory, as tables."""
        graph_module = self.traced.graph_module
        memory = estimate_memory(graph_module, num_static_inputs=self.traced.num_static_inputs)
        return (
            f"Kept for the backward:\n{residency_table(graph_module)}\nEstimated memory:\n{memory}"
        )


def training_step(
    model: nn.Module, loss_fn: LossFunction
) -> Callable[..., tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]]:
    """Forward, loss and backward as a function that returns the loss and the gradients.

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


def capture_training_step(
    model: nn.Module,
    loss_fn: LossFunction,
    *args: Any,
    recipe: Recipe,
    clock: StartupClock,
    ep_overlap: EpOverlapConfig | None = None,
    capture_layers: CaptureLayers = "auto",
    meta_device: torch.device | str = "meta",
    input_preparers: Sequence[InputPreparer] = (),
    until_code: bool = False,
) -> CaptureReport:
    """Capture ``training_step`` and run the passes on its graph.

    Args:
        model: parallelized, on its device or on meta.
        loss_fn: torchtitan's loss.
        args: example arguments of the function of ``training_step``.
        recipe: builds the passes.
        clock: counts capture and passes as parts of the start-up.
        ep_overlap: which modules run in chunks, if the strategy is eager; None for none.
        capture_layers: whether every layer is traced, or most are stamped.
        meta_device: the device for which a model on meta is captured.
        input_preparers: hooks on the arguments of ``training_step``.
        until_code: whether to leave out the passes that generate code, and those behind them.

    Raises:
        ForwardChunkingError: a module cannot run in chunks; the model is left as it was.
        ChunkMetadataError: a module that was to run in chunks was not called.
    """
    with clock.part("capture"):
        traced, stamping = trace_training_step(
            model,
            loss_fn,
            *args,
            ep_overlap=ep_overlap,
            capture_layers=capture_layers,
            meta_device=meta_device,
            input_preparers=input_preparers,
        )
    with clock.part("passes"):
        manager = recipe(PassContext.of_step(traced), "STEP")
        run = manager.run_before_code if until_code else manager.run
        report = run(traced.graph_module)
    return CaptureReport(traced=traced, passes=(report,), stamping=stamping)


def trace_training_step(
    model: nn.Module,
    loss_fn: LossFunction,
    *args: Any,
    ep_overlap: EpOverlapConfig | None = None,
    capture_layers: CaptureLayers = "auto",
    meta_device: torch.device | str = "meta",
    input_preparers: Sequence[InputPreparer] = (),
) -> tuple[TracedStep, CaptureLayersReport | None]:
    """Capture ``training_step`` and run no pass: see ``capture_training_step``.

    Returns:
        The step, and how its layers were stamped if that was asked for.
    """
    with (
        annotate_expert_regions(model),
        chunked_for_capture(model, ep_overlap or EpOverlapConfig()) as chunked,
    ):
        step = training_step(model, loss_fn)
        reports: list[CaptureLayersReport] = []
        trace = layer_tracer(capture_layers, reports.append)
        traced = trace(
            step, module=model, meta_device=meta_device, input_preparers=input_preparers
        )(*args)
        roots = chunked.roots if chunked is not None else ()
        settle_chunk_annotations(traced.graph_module, roots=roots)
    return traced, reports[0] if reports else None
