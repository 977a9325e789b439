"""A training step whose microbatches gather parameters and reduce gradients once for all of them.

A step is captured as ever, forward, loss and backward of one microbatch, and cut in up to three
graphs: of the first microbatch, which gathers, of those between, and of the last, which reduces
(``gt_pipeline.graph.cut_accumulation``; docs/decisions/0024-reduce-once.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torchtitan.tools.logging import logger

from gt_config import CaptureLayers, EpOverlapConfig, ShapeChangePolicy
from gt_passes.verifier.collective_exchange import exchange_collective_digest
from gt_pipeline.graph import (
    AccumulatedResult,
    AccumulatedStep,
)
from gt_trace import InputPreparer
from gt_trainer.artifacts.run_artifacts import RunArtifacts
from gt_trainer.startup import StartupClock
from gt_trainer.steps.captured_microbatches import (
    AccumulationReport,
    StoredAccumulation,
    capture_accumulation,
    contexts_of,
)
from gt_trainer.steps.captured_step import Recipe, remembering
from gt_trainer.steps.gradients import accumulate_gradients
from gt_trainer.steps.per_shape import PerShape
from gt_trainer.steps.training_step import (
    Batch,
    BatchPreparation,
    LossFunction,
)

Microbatch = tuple[Batch, torch.Tensor]
"""Inputs and labels, as torchtitan has them."""


class UnlikeMicrobatchesError(ValueError):
    """Microbatches of one step have different shapes, and share graphs."""


class ReduceOnceStep:
    """All microbatches of a step, as captured graphs that gather and reduce once.

    Before the first run, the ranks make sure that their graphs have the same collectives. Gradients
    reach parameters when all microbatches have run.

    Arguments are those of ``CapturedTrainingStep``, and ``verify``: whether to verify the graphs as
    cut.
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
        input_preparers: Sequence[InputPreparer] = (),
    ) -> None:
        self._input_preparers = input_preparers
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
        capturing = partial(
            capture_accumulation,
            self._model,
            self._loss_fn,
            *arguments,
            num_microbatches=len(batches),
            clock=self._clock,
            ep_overlap=self._ep_overlap,
            capture_layers=self._capture_layers,
            verify=self._verify,
            input_preparers=self._input_preparers,
        )
        if self._artifacts is None:
            report = capturing(recipe=self._recipe)
        else:
            report = self._shared(arguments, len(batches), capturing, self._artifacts)
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

    def _shared(
        self,
        arguments: tuple[Any, ...],
        num_microbatches: int,
        capturing: Callable[..., AccumulationReport],
        artifacts: RunArtifacts,
    ) -> AccumulationReport:
        """What this rank or another has captured, now or before; code is generated here."""
        recipe, managers = remembering(self._recipe)
        stored = StoredAccumulation(
            trace=partial(capturing, recipe=recipe, until_code=True),
            model=self._model,
            axes=artifacts.axes(self._model),
            clock=self._clock,
        )
        shared = artifacts.obtain(
            stored,
            passes=artifacts.passes_of("MICROBATCH"),
            model=self._model,
            loss_fn=self._loss_fn,
            arguments=arguments,
            num_microbatches=num_microbatches,
            is_first=not self.reports,
        )
        report = shared.captured
        with self._clock.part("passes"), artifacts.generating_code(shared, model=self._model):
            managers = managers or [
                recipe(each, "MICROBATCH") for each in contexts_of(report.graphs)
            ]
            passes = [
                manager.run_from_code(graph_module, earlier=earlier, is_verified=True)
                for manager, graph_module, earlier in zip(
                    managers, report.graph_modules, report.passes, strict=True
                )
            ]
        return replace(report, passes=tuple(passes))

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
