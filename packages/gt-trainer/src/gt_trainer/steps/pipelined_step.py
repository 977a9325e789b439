"""A training step in pipeline stages, captured on first use: what torchtitan calls a schedule.

torchtitan's trainer and validator call ``step`` and ``eval`` of a schedule of PyTorch's, whose
stages run eagerly. Here both run prebuilt graphs, one for each action, by ``GraphPPRunner``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.tools.logging import logger

from gt_pipeline.graph import GraphPipelineStage, StageLoss
from gt_pipeline.runner import ActivationSignature, GraphPPRunner, MicrobatchInputs
from gt_pipeline.schedules import Schedule
from gt_pipeline.split import SharedGroup
from gt_trainer._torch_internals import process_group_named
from gt_trainer.steps.captured_stage import StageProgram, stage_program
from gt_trainer.steps.layer_tracer import layer_tracer
from gt_trainer.steps.prepared_inputs import for_stages
from gt_trainer.steps.program import ProgramToCapture
from gt_trainer.steps.program_step import CaptureSetup, ProgramStep
from gt_trainer.steps.recipe import Recipe
from gt_trainer.steps.training_step import ForwardBackward, LossFunction


class PipelinedStep(ProgramStep[StageProgram]):
    """The stages of this rank under a schedule, each as a captured program.

    Args:
        parts: the stages' modules by stage index, parallelized; initialized before the first step.
        schedule: of the whole pipeline.
        loss_fn: torchtitan's.
        activation: what travels between stages for a microbatch like the one given: shape and
            dtype, or a DTensor on meta.
        pipeline_group: ranks of the pipeline, in the schedule's order.
        recipe_of: makes the passes of a stage, given its index.
        device: of the model.
        num_live_microbatches: of a stage, that hold at once what their forwards saved.
        max_unsharded_bytes: of gathered parameters, at any time; None: those of three stages.
        shared_groups: parameters that are one across stages, whose gradients are summed.
        setup: how stages are captured, unless ``attach`` says it. If it is to recapture for other
            shapes, every rank must see the same shapes in keyword arguments: capturing is
            collective.
    """

    def __init__(
        self,
        parts: Mapping[int, nn.Module],
        schedule: Schedule,
        *,
        loss_fn: LossFunction,
        activation: Callable[[MicrobatchInputs], torch.Tensor | ActivationSignature],
        pipeline_group: dist.ProcessGroup,
        recipe_of: Callable[[int], Recipe],
        device: torch.device,
        num_live_microbatches: int = 1,
        max_unsharded_bytes: int | None = None,
        shared_groups: Sequence[SharedGroup] = (),
        setup: CaptureSetup | None = None,
    ) -> None:
        super().__init__(setup or CaptureSetup())
        self._parts = parts
        self._schedule = schedule
        self._loss_fn = loss_fn
        self._activation = activation
        self._pipeline_group = pipeline_group
        self.recipe_of = recipe_of
        self._device = device
        self._num_live_microbatches = num_live_microbatches
        self._max_unsharded_bytes = max_unsharded_bytes
        self._shared_groups = tuple(shared_groups)
        self._runners: dict[tuple[object, ...], GraphPPRunner] = {}
        """Runners by the shapes of microbatches."""

        self.run: ForwardBackward = _unattached
        self.stages: dict[int, GraphPipelineStage] = {}
        """This rank's stages by index, once captured: those of the first shapes."""

    def attach(self, *, run: ForwardBackward, setup: CaptureSetup) -> None:
        """Attach what torchtitan creates after this step.

        Args:
            run: torchtitan's ``forward_backward_step``, which calls ``step``.
            setup: how stages are captured.
        """
        self.run = run
        self._setup = setup

    def step(
        self,
        *,
        arg_mbs: Sequence[tuple[torch.Tensor, ...]] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[torch.Tensor] | None = None,
        losses: list[torch.Tensor] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        return_outputs: bool = False,
    ) -> None:
        """Train on one batch, given by microbatches, as torchtitan's trainer calls a schedule.

        Args:
            arg_mbs: (tokens (b, L),) of each microbatch, on the rank of the first stage.
            kwarg_mbs: positions and masks of each microbatch, on every rank.
            target_mbs: labels (b, L) of each microbatch, on the rank of the last stage.
            losses: is filled with the losses, there.
            loss_kwargs: ``global_valid_tokens``, a scalar.
            return_outputs: only False: predictions stay on the device of the last stage.
        """
        assert not return_outputs  # torchtitan asks for none
        microbatches = self._microbatches(arg_mbs, kwarg_mbs, target_mbs, loss_kwargs or {})
        result = self._runner_for(microbatches).step_microbatches(microbatches)
        if losses is not None:
            losses.extend(result.losses)

    def eval(
        self,
        *,
        arg_mbs: Sequence[tuple[torch.Tensor, ...]] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[torch.Tensor] | None = None,
        losses: list[torch.Tensor] | None = None,
    ) -> None:
        """Compute the losses of one batch, summed over tokens; as the validator calls a schedule.

        Args:
            arg_mbs: as for ``step``; so are the others.
            kwarg_mbs: see ``step``.
            target_mbs: see ``step``.
            losses: see ``step``.
        """
        # The graph divides by a number of tokens: by one, the sum stays as it is.
        one = torch.ones((), dtype=torch.int64, device=self._device)
        microbatches = self._microbatches(
            arg_mbs, kwarg_mbs, target_mbs, {"global_valid_tokens": one}
        )
        result = self._runner_for(microbatches).eval_microbatches(microbatches)
        if losses is not None:
            losses.extend(result.losses)

    def close(self) -> None:
        """Give back recorded CUDA graphs, process groups and threads."""
        for runner in self._runners.values():
            runner.close()

    def capture(
        self, stage_index: int, part: nn.Module, microbatch: MicrobatchInputs, fake_mode: Any
    ) -> GraphPipelineStage:
        """Capture one stage, as the first step does for each of this rank's.

        Args:
            stage_index: of ``part``.
            part: parallelized, in training mode; may be on meta.
            microbatch: as the schedule is given it; may be on meta.
            fake_mode: of the stages captured before; None for the first.
        """
        schedule, recipe = self._schedule, self.recipe_of(stage_index)
        counts = {len(schedule.stages_of_rank(rank)) for rank in range(schedule.num_ranks)}
        report = self._captured(
            self.program(stage_index, part, microbatch, fake_mode),
            recipe,
            # Together only if all have as many stages to ask for.
            is_first=not self._runners and len(counts) == 1,
            part=f"stage {stage_index}",
        )
        with self._setup.clock.part("passes"):
            return GraphPipelineStage(
                part,
                transform=lambda graph, kind, context: recipe(context, kind).run(graph),
                rewritten=report.program.captured,
                trace=layer_tracer(self._setup.tracing.capture_layers),
                verify=self._setup.tracing.verify,
                **self._options(stage_index, microbatch),
            )

    def program(
        self,
        stage_index: int,
        part: nn.Module,
        microbatch: MicrobatchInputs,
        fake_mode: Any = None,
    ) -> ProgramToCapture[StageProgram]:
        """Return a stage as a program to capture, with the arguments of ``capture``."""
        return stage_program(
            part,
            self._options(stage_index, microbatch),
            loss_fn=self._loss_fn,
            num_microbatches=self._schedule.num_microbatches,
            num_live_microbatches=self._num_live_microbatches,
            options=self._setup.tracing,
            fake_mode=fake_mode,
        )

    def _options(self, stage_index: int, microbatch: MicrobatchInputs) -> dict[str, Any]:
        """Return the arguments of ``capture_stage``, for training and for evaluation."""
        num_stages = self._schedule.num_stages
        return {
            "stage_index": stage_index,
            "num_stages": num_stages,
            "activations": () if stage_index == 0 else (self._activation(microbatch),),
            "inputs": microbatch,
            "loss_fn": _stage_loss(self._loss_fn) if stage_index == num_stages - 1 else None,
            "device": self._device,
            "input_preparers": for_stages(self._setup.tracing.input_preparers),
        }

    def _microbatches(
        self,
        arg_mbs: Sequence[tuple[torch.Tensor, ...]] | None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None,
        target_mbs: Sequence[torch.Tensor] | None,
        loss_kwargs: Mapping[str, Any],
    ) -> list[MicrobatchInputs]:
        count = self._schedule.num_microbatches
        every_args = arg_mbs or [()] * count
        every_kwargs = kwarg_mbs or [{}] * count
        every_target: Sequence[Any] = [None] * count
        if target_mbs is not None:
            every_target = [(labels, dict(loss_kwargs)) for labels in target_mbs]
        return [
            MicrobatchInputs(args=args, kwargs=kwargs, target=target)
            for args, kwargs, target in zip(every_args, every_kwargs, every_target, strict=True)
        ]

    def _runner_for(self, microbatches: Sequence[MicrobatchInputs]) -> GraphPPRunner:
        shapes = _shapes(microbatches[0]) if self._setup.on_shape_change == "recapture" else ()
        if shapes not in self._runners:
            # Validation may come first; what is captured here is for training all the same.
            with _in_training_mode(self._parts.values()):
                self._runners[shapes] = self._new_runner(microbatches[0])
        return self._runners[shapes]

    def _new_runner(self, microbatch: MicrobatchInputs) -> GraphPPRunner:
        stages: dict[int, GraphPipelineStage] = {}
        fake_mode = None
        for index, part in self._parts.items():
            stages[index] = self.capture(index, part, microbatch, fake_mode)
            fake_mode = stages[index].fake_mode  # the graphs of stages that overlap share one
        self.stages = self.stages or stages
        runner = GraphPPRunner(
            list(stages.values()),
            self._schedule,
            group=self._pipeline_group,
            loss_reduction="sum",
            shared_groups=self._shared_groups,
            collective_groups=_groups_of(stages.values()),
            max_unsharded_bytes=self._max_unsharded_bytes,
        )
        if runner.replays_steps:
            logger.info("CUDA graphs: this rank's steps are recorded whole; each is one launch")
        return runner


def _groups_of(stages: Iterable[GraphPipelineStage]) -> list[dist.ProcessGroup]:
    """Return the groups in which graphs of stages communicate, and wait when a step fails.

    Read off the graphs: a plan has axes, and groups of several axes, that torchtitan's meshes lack.
    """
    names = {name: None for stage in stages for name in stage.group_names()}
    return [process_group_named(name) for name in names]


def _shapes(microbatch: MicrobatchInputs) -> tuple[object, ...]:
    """Return the shapes that graphs depend on and that every rank of a pipeline has."""
    return tuple(
        (name, tuple(value.shape))
        for name, value in sorted(microbatch.kwargs.items())
        if isinstance(value, torch.Tensor)
    )


@contextlib.contextmanager
def _in_training_mode(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Every module in training mode, and afterwards in the mode that it was in."""
    modes = {module: module.training for part in parts for module in part.modules()}
    try:
        for module in modes:
            module.training = True
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _stage_loss(loss_fn: LossFunction) -> StageLoss:
    def loss(prediction: Any, target: tuple[torch.Tensor, Mapping[str, Any]]) -> torch.Tensor:
        labels, loss_inputs = target
        value, _ = loss_fn(prediction, labels, **loss_inputs)
        return value

    return loss


def _unattached(**batch: Any) -> torch.Tensor:
    raise AssertionError("run before a trainer was attached")
