"""A training step that captures itself on first use, and knows what to do when shapes change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from gt_config import CaptureLayers, EpOverlapConfig, ShapeChangePolicy
from gt_config.graph_kinds import GraphKind
from gt_passes import PassContext, PassManager, release_cuda_graphs
from gt_passes.verifier.collective_exchange import exchange_collective_digest
from gt_trace import BoundStep, InputPreparer
from gt_trainer.artifacts.run_artifacts import RunArtifacts
from gt_trainer.startup import StartupClock
from gt_trainer.steps.captured_step import (
    CaptureReport,
    Recipe,
    capture_training_step,
)
from gt_trainer.steps.gradients import accumulate_gradients
from gt_trainer.steps.per_shape import PerShape
from gt_trainer.steps.stored_step import StoredTrainingStep
from gt_trainer.steps.training_step import Batch, BatchPreparation, LossFunction


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
        artifacts: where graphs are looked for and stored; None: every rank captures for itself.
        input_preparers: hooks on the inputs of a capture.
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
        artifacts: RunArtifacts | None = None,
        input_preparers: Sequence[InputPreparer] = (),
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._preparation = preparation
        self._recipe = recipe
        self._clock = clock
        self._on_capture = on_capture
        self._ep_overlap = ep_overlap
        self._capture_layers: CaptureLayers = capture_layers
        self._artifacts = artifacts
        self._input_preparers = input_preparers
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
        if self._artifacts is None:
            report = self._capturing(args, self._recipe)()
        else:
            report = self._shared(args, self._artifacts)
        self._on_capture(report)
        if not self.reports:
            # Only then: later, ranks with other shapes may capture at other times.
            exchange_collective_digest(report.traced.graph_module)
        self.reports = (*self.reports, report)
        return report.traced.bind(self._model)

    def _capturing(
        self, args: tuple[Any, ...], recipe: Recipe, *, until_code: bool = False
    ) -> Callable[[], CaptureReport]:
        return partial(
            capture_training_step,
            self._model,
            self._loss_fn,
            *args,
            recipe=recipe,
            clock=self._clock,
            ep_overlap=self._ep_overlap,
            capture_layers=self._capture_layers,
            input_preparers=self._input_preparers,
            until_code=until_code,
        )

    def _shared(self, args: tuple[Any, ...], artifacts: RunArtifacts) -> CaptureReport:
        """What this rank or another has captured, now or before; code is generated here."""
        managers: list[PassManager] = []

        def recipe(context: PassContext, graph: GraphKind) -> PassManager:
            managers.append(self._recipe(context, graph))
            return managers[-1]

        stored = StoredTrainingStep(
            trace=self._capturing(args, recipe, until_code=True),
            model=self._model,
            axes=artifacts.axes(self._model),
            clock=self._clock,
        )
        shared = artifacts.obtain(
            stored,
            passes=artifacts.passes_of("STEP"),
            model=self._model,
            loss_fn=self._loss_fn,
            arguments=args,
            is_first=not self.reports,
        )
        report = shared.captured
        if not managers:
            recipe(PassContext.of_step(report.traced), "STEP")
        with (
            self._clock.part("passes"),
            artifacts.generating_code(shared, model=self._model),
        ):
            passes = managers[-1].run_from_code(
                report.traced.graph_module, earlier=report.passes[0], is_verified=True
            )
        return replace(report, passes=(passes,))
