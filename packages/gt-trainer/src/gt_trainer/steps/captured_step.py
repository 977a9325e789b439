"""A training step that captures itself on first use, and knows what to do when shapes change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from gt_config import CaptureLayers, EpOverlapConfig, ShapeChangePolicy
from gt_config.graph_kinds import GraphKind
from gt_passes import (
    PassContext,
    PassManager,
    PassManagerReport,
    estimate_memory,
    release_cuda_graphs,
    residency_table,
)
from gt_passes.ep_overlap import settle_chunk_annotations
from gt_passes.verifier.collective_exchange import exchange_collective_digest
from gt_trace import BoundStep, TracedStep, phase
from gt_trainer.decoder.eager_chunks import chunked_for_capture
from gt_trainer.decoder.expert_regions import annotate_expert_regions
from gt_trainer.startup import StartupClock
from gt_trainer.steps.gradients import accumulate_gradients
from gt_trainer.steps.layer_tracer import CaptureLayersReport, layer_tracer
from gt_trainer.steps.per_shape import PerShape
from gt_trainer.steps.training_step import (
    Batch,
    BatchPreparation,
    LossFunction,
    loss_of_batch,
    num_operators,
)

Recipe = Callable[[PassContext, GraphKind], PassManager]
"""Builds the passes for one captured graph, of the kind given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """What a capture produced, for the log."""

    traced: TracedStep
    passes: tuple[PassManagerReport]
    """What they did to the one graph."""

    stamping: CaptureLayersReport | None = None
    """How layers were stamped, or why not; None if that was not asked for."""

    def __str__(self) -> str:
        """One line: the operators that run, and the passes that made them."""
        return (
            f"Captured the training step: {self.num_nodes:,} operators after "
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
        )
    with clock.part("passes"):
        static_inputs = traced.inputs[: traced.num_static_inputs]
        context = PassContext(
            fake_mode=traced.fake_mode,
            static_input_names=tuple(graph_input.name for graph_input in static_inputs),
        )
        report = recipe(context, "STEP").run(traced.graph_module)
    return CaptureReport(traced=traced, passes=(report,), stamping=stamping)


def trace_training_step(
    model: nn.Module,
    loss_fn: LossFunction,
    *args: Any,
    ep_overlap: EpOverlapConfig | None = None,
    capture_layers: CaptureLayers = "auto",
    meta_device: torch.device | str = "meta",
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
        traced = trace(step, module=model, meta_device=meta_device)(*args)
        roots = chunked.roots if chunked is not None else ()
        settle_chunk_annotations(traced.graph_module, roots=roots)
    return traced, reports[0] if reports else None


class CapturedTrainingStep:
    """A training step as one captured graph, optimized by passes and bound to the model.

    Before the first run, the ranks make sure that their graphs have the same collectives.

    Args:
        model: parallelized, on its device.
        loss_fn: torchtitan's loss.
        preparation: what torchtitan does around the model for one batch.
        recipe: builds the passes for a captured graph.
        on_shape_change: "error" lets the mismatch of a changed input through; "recapture" makes
            another graph for the new shapes and keeps both.
        clock: counts capture and passes as parts of the start-up.
        ep_overlap: which modules run in chunks, if the strategy is eager; None for none.
        capture_layers: whether every layer is traced, or most are stamped.
        on_capture: called after each capture, before the graph first runs.
    """

    is_captured = True
    runs_whole_steps = False

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        *,
        preparation: BatchPreparation,
        recipe: Recipe,
        on_shape_change: ShapeChangePolicy,
        clock: StartupClock,
        on_capture: Callable[[CaptureReport], None],
        ep_overlap: EpOverlapConfig | None = None,
        capture_layers: CaptureLayers = "auto",
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._preparation = preparation
        self._recipe = recipe
        self._clock = clock
        self._on_capture = on_capture
        self._ep_overlap = ep_overlap
        self._capture_layers: CaptureLayers = capture_layers
        self.reports: tuple[CaptureReport, ...] = ()
        self._calls = PerShape(self._capture, policy=on_shape_change)

    def run(
        self,
        *,
        input_dict: Batch | list[Batch],
        labels: torch.Tensor | list[torch.Tensor],
        global_valid_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """See ``TrainingStep``.

        Raises:
            InputMismatchError: an input differs from the captured one and the policy is "error".
        """
        assert isinstance(input_dict, dict)
        assert isinstance(labels, torch.Tensor)
        inputs, labels, extra_kwargs = self._preparation.split(input_dict, labels)
        with self._preparation.context():
            loss: torch.Tensor
            loss, gradients = self._calls(inputs, labels, global_valid_tokens, extra_kwargs)
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        accumulate_gradients(parameters, gradients)
        return loss

    def close(self) -> None:
        """Let go of recorded CUDA graphs."""
        for report in self.reports:
            release_cuda_graphs(report.traced.graph_module)

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundStep:
        assert not kwargs
        report = capture_training_step(
            self._model,
            self._loss_fn,
            *args,
            recipe=self._recipe,
            clock=self._clock,
            ep_overlap=self._ep_overlap,
            capture_layers=self._capture_layers,
        )
        self._on_capture(report)
        if not self.reports:
            # Only then: later, ranks with other shapes may capture at other times.
            exchange_collective_digest(report.traced.graph_module)
        self.reports = (*self.reports, report)
        return report.traced.bind(self._model)
