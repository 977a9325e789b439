"""Mode ``aot_joint``: a model's forward as two captured graphs, inside torchtitan's autograd loop.

What is captured is the model as it is called: forward and backward of everything up to its output.
The loss stays outside, and with the chunked loss the output projection too, since the loss applies
it piece by piece (``decoder/chunked_loss.py``). Both, and ``loss.backward()``, run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from gt_config import JointPartitioner, ShapeChangePolicy
from gt_passes import (
    release_cuda_graphs,
)
from gt_passes.verifier.collective_exchange import exchange_collective_digest
from gt_trace import InputPreparer
from gt_trace.joint.bound_joint import BoundJoint
from gt_trainer.artifacts.run_artifacts import RunArtifacts
from gt_trainer.startup import StartupClock
from gt_trainer.steps.captured_joint import (
    JointCaptureReport,
    StoredJoint,
    capture_joint,
    contexts_of,
)
from gt_trainer.steps.captured_step import Recipe, remembering
from gt_trainer.steps.per_shape import PerShape
from gt_trainer.steps.training_step import (
    Batch,
    BatchPreparation,
    LossFunction,
    loss_of_batch,
)


class JointForward:
    """The forward of ``model`` as captured graphs; captures itself on first use.

    Before the first run, the ranks make sure that their graphs have the same collectives.

    Args:
        model: parallelized, on its device, in training mode.
        partitioner: how the joint graph is cut.
        recipe: builds the passes.
        on_shape_change: "error" lets the mismatch of a changed input through; "recapture" makes
            other graphs for the new shapes and keeps both.
        clock: counts capture and passes as parts of the start-up.
        on_capture: called after each capture, before the graphs first run.
        artifacts: where graphs are looked for and stored; None: every rank captures for itself.
        input_preparers: hooks on the inputs of a capture.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        partitioner: JointPartitioner,
        recipe: Recipe,
        on_shape_change: ShapeChangePolicy,
        clock: StartupClock,
        on_capture: Callable[[JointCaptureReport], None],
        artifacts: RunArtifacts | None = None,
        input_preparers: Sequence[InputPreparer] = (),
    ) -> None:
        self._input_preparers = input_preparers
        self._model = model
        self._partitioner = partitioner
        self._recipe = recipe
        self._clock = clock
        self._on_capture = on_capture
        self._artifacts = artifacts
        self.reports: tuple[JointCaptureReport, ...] = ()
        self._calls = PerShape(self._capture, policy=on_shape_change)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward graph on the model's arguments; the outputs carry autograd's history.

        Raises:
            InputMismatchError: an input differs from the captured one and the policy is "error".
        """
        return self._calls(*args, **kwargs)

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundJoint:
        capturing = partial(
            capture_joint,
            self._model,
            args,
            kwargs,
            partitioner=self._partitioner,
            clock=self._clock,
            input_preparers=self._input_preparers,
        )
        if self._artifacts is None:
            report = capturing(recipe=self._recipe)
        else:
            report = self._shared((args, kwargs), capturing, self._artifacts)
        self._on_capture(report)
        if not self.reports:
            # Only then: later, ranks with other shapes may capture at other times.
            for graph_module in report.graph_modules:
                exchange_collective_digest(graph_module)
        self.reports = (*self.reports, report)
        return report.parts.bind(self._model)

    def _shared(
        self,
        arguments: tuple[Any, ...],
        capturing: Callable[..., JointCaptureReport],
        artifacts: RunArtifacts,
    ) -> JointCaptureReport:
        """What this rank or another has captured, now or before; code is generated here."""
        recipe, managers = remembering(self._recipe)
        stored = StoredJoint(
            trace=partial(capturing, recipe=recipe, until_code=True),
            model=self._model,
            axes=artifacts.axes(self._model),
            clock=self._clock,
        )
        shared = artifacts.obtain(
            stored,
            passes=(*artifacts.passes_of("JOINT_FORWARD"), *artifacts.passes_of("JOINT_BACKWARD")),
            model=self._model,
            loss_fn=None,  # it stays outside
            arguments=arguments,
            is_first=not self.reports,
        )
        report = shared.captured
        with self._clock.part("passes"), artifacts.generating_code(shared, model=self._model):
            forward, backward = managers or [recipe(*c) for c in contexts_of(report.parts)]
            parts, (first, second) = report.parts, report.passes
            return replace(
                report,
                passes=(
                    forward.run_from_code(parts.forward, earlier=first, is_verified=True),
                    backward.run_from_code(parts.backward, earlier=second, is_verified=True),
                ),
            )


class JointStep:
    """A captured forward, and a loss and its ``backward()`` that run eagerly.

    Args:
        forward: of the model.
        loss_fn: torchtitan's loss.
        preparation: what torchtitan does around the model for one batch.
    """

    is_captured = True
    runs_whole_steps = False

    def __init__(
        self, forward: JointForward, loss_fn: LossFunction, *, preparation: BatchPreparation
    ) -> None:
        self._forward = forward
        self._loss_fn = loss_fn
        self._preparation = preparation

    @property
    def reports(self) -> tuple[JointCaptureReport, ...]:
        """One for each capture so far, oldest first."""
        return self._forward.reports

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
            prediction = self._forward(inputs, **extra_kwargs)
            loss = loss_of_batch(
                self._loss_fn, prediction, labels, global_valid_tokens, extra_kwargs
            )
            del prediction  # the backward then frees it as soon as it can
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return loss

    def close(self) -> None:
        """Let go of recorded CUDA graphs."""
        for report in self.reports:
            for graph_module in report.graph_modules:
                release_cuda_graphs(graph_module)
