"""A training step whose microbatches gather parameters and reduce gradients once for all of them.

A step is captured as ever, forward, loss and backward of one microbatch, and cut in up to three
graphs: of the first microbatch, which gathers, of those between, and of the last, which reduces
(``gt_pipeline.graph.cut_accumulation``; docs/decisions/0024-reduce-once.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torchtitan.tools.logging import logger

from gt_config import CaptureLayers, EpOverlapConfig, ShapeChangePolicy
from gt_passes import PassContext, PassManagerReport, estimate_memory, residency_table
from gt_passes.verifier.collective_exchange import exchange_collective_digest
from gt_pipeline.graph import (
    AccumulatedResult,
    AccumulatedStep,
    AccumulationGraphs,
    cut_accumulation,
)
from gt_trace import TracedStep
from gt_trainer.artifacts.run_artifacts import RunArtifacts
from gt_trainer.startup import StartupClock
from gt_trainer.steps.captured_step import Recipe, trace_training_step
from gt_trainer.steps.gradients import accumulate_gradients
from gt_trainer.steps.layer_tracer import CaptureLayersReport
from gt_trainer.steps.per_shape import PerShape
from gt_trainer.steps.stored_step import StoredTrace
from gt_trainer.steps.training_step import (
    Batch,
    BatchPreparation,
    LossFunction,
    num_operators,
)

Microbatch = tuple[Batch, torch.Tensor]
"""Inputs and labels, as torchtitan has them."""


class UnlikeMicrobatchesError(ValueError):
    """Microbatches of one step have different shapes, and share graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationReport:
    """What a capture produced, for the log."""

    graphs: AccumulationGraphs
    passes: tuple[PassManagerReport, ...]
    """What they did, on each graph."""

    stamping: CaptureLayersReport | None = None
    """How layers were stamped, or why not; None if that was not asked for."""

    @property
    def graph_modules(self) -> tuple[GraphModule, ...]:
        """The graphs that run, after passes."""
        return tuple(each.graph_module for each in self.graphs.graphs)

    @property
    def num_nodes_captured(self) -> int:
        """Operators of the step as captured."""
        return num_operators(self.graphs.traced.graph_module)

    @property
    def num_nodes(self) -> int:
        """Operators of one microbatch as it runs, where graphs differ the most."""
        return max(map(num_operators, self.graph_modules))

    def __str__(self) -> str:
        """One line: the operators of each microbatch."""
        counts = ", ".join(
            f"{each.role} {num_operators(each.graph_module):,}" for each in self.graphs.graphs
        )
        return (
            f"Captured the microbatches of a training step, {self.graphs.num_microbatches} of "
            f"them; operators after {len(self.passes[0].records)} passes: {counts}"
        )

    def memory_text(self) -> str:
        """What is kept for the backward, and the estimated memory, as tables; the last has most."""
        last = self.graphs.last
        memory = estimate_memory(
            last.graph_module,
            num_static_inputs=self.graphs.traced.num_static_inputs,
            released_inputs=last.released_inputs,
            input_kinds=last.input_kinds,
        )
        table = residency_table(last.graph_module)
        return f"Kept for the backward:\n{table}\nEstimated memory:\n{memory}"


def capture_accumulation(
    model: nn.Module,
    loss_fn: LossFunction,
    *args: Any,
    num_microbatches: int,
    recipe: Recipe,
    clock: StartupClock,
    ep_overlap: EpOverlapConfig | None = None,
    capture_layers: CaptureLayers = "auto",
    meta_device: torch.device | str = "meta",
    verify: bool = True,
    obtain: Callable[[Callable[[], TracedStep]], TracedStep] = lambda trace: trace(),
) -> AccumulationReport:
    """Capture one microbatch, cut it for all of a step, and run the passes on every graph.

    Args:
        model: as for ``capture_training_step``; so are those that are not told here.
        loss_fn: see ``model``.
        args: see ``model``.
        num_microbatches: of a step, two or more.
        recipe: see ``model``.
        clock: see ``model``.
        ep_overlap: see ``model``.
        capture_layers: see ``model``.
        meta_device: see ``model``.
        verify: whether to verify the graphs as cut.
        obtain: given what traces the step, gives the step: that or one that was stored.

    Raises:
        StageCutError: what is gathered or reduced cannot be shared.
        ForwardChunkingError, ChunkMetadataError: as ``capture_training_step``.
    """
    stamping: CaptureLayersReport | None = None

    def trace() -> TracedStep:
        nonlocal stamping
        with clock.part("capture"):
            traced, stamping = trace_training_step(
                model,
                loss_fn,
                *args,
                ep_overlap=ep_overlap,
                capture_layers=capture_layers,
                meta_device=meta_device,
            )
        return traced

    traced = obtain(trace)
    with clock.part("passes"):
        graphs = cut_accumulation(
            traced, num_results=1, num_microbatches=num_microbatches, verify=verify
        )
        reports = []
        for each in graphs.graphs:
            context = PassContext(
                fake_mode=traced.fake_mode, static_input_names=each.static_input_names
            )
            reports.append(recipe(context, "MICROBATCH").run(each.graph_module))
    return AccumulationReport(graphs=graphs, passes=tuple(reports), stamping=stamping)


class ReduceOnceStep:
    """All microbatches of a step, as captured graphs that gather and reduce once.

    Before the first run, the ranks make sure that their graphs have the same collectives. Gradients
    reach parameters when all microbatches have run.

    Arguments are those of ``CapturedTrainingStep``, and ``verify``: whether to verify the graphs as
    cut. With ``artifacts``, what is stored is the step before it is cut.
    """

    is_captured = True
    runs_whole_steps = True

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        *,
        preparation: BatchPreparation,
        recipe: Recipe,
        on_shape_change: ShapeChangePolicy,
        clock: StartupClock,
        on_capture: Callable[[AccumulationReport], None],
        ep_overlap: EpOverlapConfig | None = None,
        capture_layers: CaptureLayers = "auto",
        verify: bool = True,
        artifacts: RunArtifacts | None = None,
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._preparation = preparation
        self._recipe = recipe
        self._clock = clock
        self._on_capture = on_capture
        self._ep_overlap = ep_overlap
        self._capture_layers: CaptureLayers = capture_layers
        self._verify = verify
        self._artifacts = artifacts
        self.reports: tuple[AccumulationReport, ...] = ()
        self._steps: list[AccumulatedStep] = []
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
            UnlikeMicrobatchesError: microbatches have different shapes. Nothing has run.
            InputMismatchError: they differ from the captured ones and the policy is "error".
        """
        assert isinstance(input_dict, list)
        assert isinstance(labels, list)
        batches = list(zip(input_dict, labels, strict=True))
        _refuse_unlike(batches)
        with self._preparation.context():
            result: AccumulatedResult = self._calls(batches, global_valid_tokens)
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        accumulate_gradients(parameters, result.gradients)
        losses: list[torch.Tensor] = [loss for (loss,) in result.results]
        total = losses[0].clone()
        for loss in losses[1:]:
            total.add_(loss)
        return total

    def close(self) -> None:
        """Let go of recorded CUDA graphs."""
        for step in self._steps:
            step.release()

    def _capture(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., AccumulatedResult]:
        batches, global_valid_tokens = args
        assert not kwargs
        arguments = self._arguments(batches[0], global_valid_tokens)
        report = capture_accumulation(
            self._model,
            self._loss_fn,
            *arguments,
            num_microbatches=len(batches),
            recipe=self._recipe,
            clock=self._clock,
            ep_overlap=self._ep_overlap,
            capture_layers=self._capture_layers,
            verify=self._verify,
            obtain=partial(self._obtain, arguments, num_microbatches=len(batches)),
        )
        self._on_capture(report)
        if not self.reports:
            # Only then: later, ranks with other shapes may capture at other times.
            for graph_module in report.graph_modules:
                exchange_collective_digest(graph_module)
        self.reports = (*self.reports, report)
        step = AccumulatedStep(report.graphs, self._model)
        self._steps.append(step)
        if step.left_alone:
            logger.warning(
                "The step is not recorded as a CUDA graph, since the graph of its "
                f"{' and '.join(step.left_alone)} microbatch is left alone: all or none are"
            )

        def run(batches: Iterable[Microbatch], tokens: torch.Tensor) -> AccumulatedResult:
            # Masks are made as a microbatch comes to run: all of them would fill memory. But where
            # steps are recorded, all are asked for.
            return step(self._arguments(batch, tokens) for batch in batches)

        return run

    def _obtain(
        self, arguments: tuple[Any, ...], trace: Callable[[], TracedStep], *, num_microbatches: int
    ) -> TracedStep:
        if self._artifacts is None:
            return trace()
        axes = self._artifacts.axes(self._model)
        return self._artifacts.obtain(
            StoredTrace(trace=trace, model=self._model, axes=axes, clock=self._clock),
            passes=self._artifacts.passes_of("MICROBATCH"),
            model=self._model,
            loss_fn=self._loss_fn,
            arguments=arguments,
            num_microbatches=num_microbatches,
            is_first=not self.reports,
        )

    def _arguments(
        self, microbatch: Microbatch, global_valid_tokens: torch.Tensor
    ) -> tuple[Any, ...]:
        inputs, labels, extra_kwargs = self._preparation.split(*microbatch)
        return inputs, labels, global_valid_tokens, extra_kwargs


def _refuse_unlike(batches: Sequence[Microbatch]) -> None:
    """Before the first runs: a later one would be refused when buffers have changed."""
    shapes = [
        {
            **{name: tuple(each.shape) for name, each in inputs.items()},
            "labels": tuple(labels.shape),
        }
        for inputs, labels in batches
    ]
    for number, found in enumerate(shapes):
        if found != shapes[0]:
            raise UnlikeMicrobatchesError(
                f"microbatch {number} of this step has shapes {found}, and the first {shapes[0]}: "
                "microbatches that gather and reduce once run the same graphs. Give batches of "
                "one shape, or --compile.accumulation every_microbatch"
            )
