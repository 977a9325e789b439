"""Training steps that capture themselves on first use, each as a program."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import torch
from torch import nn
from torchtitan.tools.logging import logger

from gt_config import ShapeChangePolicy
from gt_passes import release_cuda_graphs
from gt_passes.verifier.collective_exchange import exchange_collective_digest
from gt_pipeline.graph import AccumulatedResult, AccumulatedStep
from gt_trace import BoundStep, InputMismatchError
from gt_trainer.artifacts.run_artifacts import RunArtifacts
from gt_trainer.device_transfer import local_part
from gt_trainer.startup import StartupClock
from gt_trainer.steps.captured_joint import JointProgram, joint_program
from gt_trainer.steps.captured_microbatches import MicrobatchProgram, microbatches
from gt_trainer.steps.captured_step import WholeStepProgram, whole_step
from gt_trainer.steps.program import (
    CaptureReport,
    ProgramT,
    ProgramToCapture,
    StoredProgram,
    TracingOptions,
    capture_program,
    generate_code,
)
from gt_trainer.steps.recipe import Recipe
from gt_trainer.steps.training_step import (
    Batch,
    BatchPreparation,
    LossFunction,
    loss_of_batch,
)

Microbatch = tuple[Batch, torch.Tensor]
"""Inputs and labels, as torchtitan has them."""


class UnlikeMicrobatchesError(ValueError):
    """Microbatches of one step have different shapes, and share graphs."""


class PerShape:
    """Captures on the first call, and again for other inputs if the policy says so.

    Args:
        capture: makes, of the (args, kwargs) of a call, what runs such calls. That raises
            ``InputMismatchError`` before it runs anything, if it does not fit a call.
        policy: "error" lets that error through; "recapture" captures for the new inputs and keeps
            what was captured before.
    """

    def __init__(
        self,
        capture: Callable[[tuple[Any, ...], dict[str, Any]], Callable[..., Any]],
        *,
        policy: ShapeChangePolicy,
    ) -> None:
        self._capture = capture
        self._policy = policy
        self._bound: list[Callable[..., Any]] = []
        """The one used last comes first."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run what fits the call.

        Raises:
            InputMismatchError: nothing does, and the policy is "error".
        """
        if not self._bound:
            self._bound.append(self._capture(args, kwargs))
        if self._policy == "error":
            return self._bound[0](*args, **kwargs)
        for bound in self._bound:
            try:
                result = bound(*args, **kwargs)
            except InputMismatchError:
                continue
            self._bound.remove(bound)
            self._bound.insert(0, bound)
            return result
        self._bound.insert(0, self._capture(args, kwargs))
        return self._bound[0](*args, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSetup:
    """Settings of a step that captures itself."""

    clock: StartupClock = field(default_factory=StartupClock)
    """Counts capture and passes as parts of the start-up."""

    on_capture: Callable[[CaptureReport[Any]], None] = lambda report: None
    """Called after each capture, before the graphs first run."""

    on_shape_change: ShapeChangePolicy = "error"
    """"error" lets the mismatch of a changed input through; "recapture" captures other graphs for
    the new shapes and keeps both."""

    tracing: TracingOptions = field(default_factory=TracingOptions)
    artifacts: RunArtifacts | None = None
    """Store of graphs; None: every rank captures for itself."""


class ProgramStep(Generic[ProgramT]):
    """A training step of captured programs, optimized by passes."""

    is_captured = True
    runs_whole_steps = False

    def __init__(self, setup: CaptureSetup) -> None:
        self._setup = setup
        self.reports: tuple[CaptureReport[ProgramT], ...] = ()

    def _captured(
        self,
        asked: ProgramToCapture[ProgramT],
        recipe: Recipe,
        *,
        is_first: bool,
        part: str = "model",
    ) -> CaptureReport[ProgramT]:
        """Return what this rank or another has captured, now or before. Code is generated here.

        Args:
            asked: The program.
            recipe: Builds its passes.
            is_first: As for ``RunArtifacts.obtain``.
            part: As for ``RunArtifacts.generating_code``.
        """
        setup, artifacts = self._setup, self._setup.artifacts
        if artifacts is None:
            report = capture_program(asked, recipe=recipe, clock=setup.clock)
        else:
            axes = artifacts.axes(asked.model)
            stored = StoredProgram(asked=asked, recipe=recipe, axes=axes, clock=setup.clock)
            shared = artifacts.obtain(stored, is_first=is_first)
            with setup.clock.part("passes"), artifacts.generating_code(shared, axes, part=part):
                report = generate_code(shared.captured, recipe)
        setup.on_capture(report)
        self.reports = (*self.reports, report)
        return report


class ModelStep(ProgramStep[ProgramT], ABC):
    """A training step of a whole model as one program.

    Before the first run, the ranks make sure that their graphs have the same collectives.

    Args:
        model: Parallelized, on its device.
        loss_fn: torchtitan's loss.
        recipe: Builds the passes for a captured graph.
        preparation: What torchtitan does around the model for one batch.
        setup: How the step is captured.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        *,
        recipe: Recipe,
        preparation: BatchPreparation,
        setup: CaptureSetup,
    ) -> None:
        super().__init__(setup)
        self._model = model
        self._loss_fn = loss_fn
        self._recipe = recipe
        self._preparation = preparation
        self._calls = PerShape(self._capture, policy=setup.on_shape_change)

    def run(
        self,
        *,
        input_dict: Batch | list[Batch],
        labels: torch.Tensor | list[torch.Tensor],
        global_valid_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """See ``TrainingStep``.

        Raises:
            InputMismatchError: An input differs from the captured one and the policy is "error".
            UnlikeMicrobatchesError: Microbatches of one step have different shapes. Nothing has
                run.
        """
        batches: list[Any] = [(input_dict, labels)]
        if self.runs_whole_steps:
            batches = list(zip(input_dict, labels, strict=True))
            _refuse_unlike(batches)
        with self._preparation.context():
            return self._train(batches, global_valid_tokens)

    @abstractmethod
    def _train(
        self, batches: Sequence[Microbatch], global_valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Add the gradients of batches to ``param.grad``, and return the loss."""

    @abstractmethod
    def _program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ProgramToCapture[ProgramT]:
        """Return the program of a call."""

    @abstractmethod
    def _bind(self, program: ProgramT) -> Callable[..., Any]:
        """Return what runs such calls on the state of the model."""

    def close(self) -> None:
        """Release recorded CUDA graphs."""
        for report in self.reports:
            for graph_module in report.graph_modules:
                release_cuda_graphs(graph_module)

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        is_first = not self.reports
        report = self._captured(self._program(args, kwargs), self._recipe, is_first=is_first)
        if is_first:
            # Only then: later, ranks with other shapes may capture at other times.
            for graph_module in report.graph_modules:
                exchange_collective_digest(graph_module)
        return self._bind(report.program)

    def _arguments(
        self, microbatch: Microbatch, global_valid_tokens: torch.Tensor
    ) -> tuple[Any, ...]:
        """Return the arguments of ``training_step``'s function for a batch."""
        inputs, labels, extra_kwargs = self._preparation.split(*microbatch)
        return inputs, labels, global_valid_tokens, extra_kwargs

    def _accumulate(self, gradients: Sequence[torch.Tensor | None]) -> None:
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        accumulate_gradients(parameters, gradients)


class CapturedTrainingStep(ModelStep[WholeStepProgram]):
    """Each batch as one graph of forward, loss and backward."""

    def _train(
        self, batches: Sequence[Microbatch], global_valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        loss: torch.Tensor
        loss, gradients = self._calls(*self._arguments(batches[0], global_valid_tokens))
        self._accumulate(gradients)
        return loss

    def _program(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ProgramToCapture[WholeStepProgram]:
        assert not kwargs
        return whole_step(self._model, self._loss_fn, *args, options=self._setup.tracing)

    def _bind(self, program: WholeStepProgram) -> BoundStep:
        return program.captured.bind(self._model)


class JointStep(ModelStep[JointProgram]):
    """A captured forward, and a loss and its ``backward()`` that run eagerly."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward graph on the model's arguments; the outputs carry autograd's history.

        Raises:
            InputMismatchError: As for ``run``.
        """
        return self._calls(*args, **kwargs)

    def _train(
        self, batches: Sequence[Microbatch], global_valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        inputs, labels, _, extra_kwargs = self._arguments(batches[0], global_valid_tokens)
        prediction = self.forward(inputs, **extra_kwargs)
        loss = loss_of_batch(self._loss_fn, prediction, labels, global_valid_tokens, extra_kwargs)
        del prediction  # the backward then frees it as soon as it can
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return loss

    def _program(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ProgramToCapture[JointProgram]:
        return joint_program(self._model, args, kwargs, options=self._setup.tracing)

    def _bind(self, program: JointProgram) -> Callable[..., Any]:
        return program.captured.bind(self._model)


class ReduceOnceStep(ModelStep[MicrobatchProgram]):
    """All microbatches of a step, as captured graphs that gather and reduce once.

    Gradients reach parameters when all microbatches have run.
    """

    runs_whole_steps = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._steps: list[AccumulatedStep] = []

    def _train(
        self, batches: Sequence[Microbatch], global_valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        result: AccumulatedResult = self._calls(batches, global_valid_tokens)
        self._accumulate(result.gradients)
        losses: list[torch.Tensor] = [loss for (loss,) in result.results]
        total = losses[0].clone()
        for loss in losses[1:]:
            total.add_(loss)
        return total

    def close(self) -> None:
        """Release recorded CUDA graphs."""
        for step in self._steps:
            step.release()

    def _program(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ProgramToCapture[MicrobatchProgram]:
        batches, global_valid_tokens = args
        assert not kwargs
        return microbatches(
            self._model,
            self._loss_fn,
            *self._arguments(batches[0], global_valid_tokens),
            num_microbatches=len(batches),
            options=self._setup.tracing,
        )

    def _bind(self, program: MicrobatchProgram) -> Callable[..., AccumulatedResult]:
        step = AccumulatedStep(program.captured, self._model)
        self._steps.append(step)
        if step.left_alone:
            logger.warning(
                "The step is not recorded as a CUDA graph, since the graph of its "
                f"{' and '.join(step.left_alone)} microbatch is left alone: all or none are"
            )

        def run(batches: Iterable[Microbatch], tokens: torch.Tensor) -> AccumulatedResult:
            # A generator: all masks together would fill memory. A recorded step reads all.
            return step(self._arguments(batch, tokens) for batch in batches)

        return run


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


# Gradients reach ``param.grad`` as autograd would leave them. The first is taken as it is if it has
# the parameter's layout and shares its memory with no other tensor. Later ones are added in place.


def accumulate_gradients(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> None:
    """Add ``gradients`` to the ``.grad`` of ``parameters``, in place where there is one.

    Args:
        parameters: leaves, in the order of the gradients.
        gradients: one for each parameter, of its shape, dtype and placement; None where the loss
            does not depend on it, which leaves ``.grad`` alone.
    """
    # Two parameters that are only ever added have one and the same gradient, which clipping would
    # scale twice.
    taken = {_storage(parameter) for parameter in parameters}
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            parameter.grad = _own(parameter, gradient, taken)
            taken.add(_storage(parameter.grad))
        else:
            local_part(parameter.grad).add_(local_part(gradient))


def _own(parameter: torch.Tensor, gradient: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """The gradient, or a copy of it if its memory is another's or laid out otherwise."""
    is_alone = _storage(gradient) not in taken
    if is_alone and local_part(gradient).stride() == local_part(parameter).stride():
        return gradient
    copy = torch.empty_like(parameter, requires_grad=False)
    local_part(copy).copy_(local_part(gradient))
    return copy


def _storage(tensor: torch.Tensor) -> int:
    """Identifies the memory behind a tensor."""
    return local_part(tensor).untyped_storage().data_ptr()
