"""A training step in pipeline stages, captured on first use: what torchtitan calls a schedule.

torchtitan's trainer and validator call ``step`` and ``eval`` of a schedule of PyTorch's, whose
stages run eagerly. Here both run prebuilt graphs, one for each action, by ``GraphPPRunner``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.tools.logging import logger

from gt_config import CaptureLayers, EpOverlapConfig, ShapeChangePolicy
from gt_passes.ep_overlap import settle_chunk_annotations
from gt_pipeline.graph import GraphPipelineStage, StageLoss, capture_stage, rewrite_stage
from gt_pipeline.runner import ActivationSignature, GraphPPRunner, MicrobatchInputs
from gt_pipeline.schedules import Schedule
from gt_pipeline.split import SharedGroup
from gt_trace import InputPreparer
from gt_trainer._torch_internals import process_group_named
from gt_trainer.artifacts.run_artifacts import RunArtifacts
from gt_trainer.artifacts.stage_names import StageNames
from gt_trainer.decoder.eager_chunks import chunked_for_capture
from gt_trainer.decoder.expert_regions import annotate_expert_regions
from gt_trainer.startup import StartupClock
from gt_trainer.steps.captured_stage import (
    CapturedStage,
    StageCaptureReport,
    StageToStore,
    StoredStage,
)
from gt_trainer.steps.layer_tracer import CaptureLayersReport, layer_tracer
from gt_trainer.steps.prepared_inputs import for_stages
from gt_trainer.steps.stage_recipe import StagePasses
from gt_trainer.steps.training_step import ForwardBackward, LossFunction


class PipelinedStep:
    """The stages of this rank under a schedule.

    Args:
        parts: the stages' modules by stage index, parallelized; initialized before the first step.
        schedule: of the whole pipeline.
        loss_fn: torchtitan's.
        activation: what travels between stages for a microbatch like the one given: shape and
            dtype, or a DTensor on meta.
        pipeline_group: ranks of the pipeline, in the schedule's order.
        new_passes: makes the passes of a stage, given its index.
        device: of the model.
        max_unsharded_bytes: of gathered parameters, at any time; None: those of three stages.
        shared_groups: parameters that are one across stages, whose gradients are summed.
        ep_overlap: which modules run in chunks while stages are trained, if the strategy is eager.
        verify: whether to verify every graph of a stage, as captured, as cut, and after passes.
        capture_layers: whether every layer of a stage is traced, or most are stamped.
        on_shape_change: "error" refuses microbatches of other shapes than the first; "recapture"
            captures stages for them too, and keeps both. Every rank must see the same shapes in
            keyword arguments: capturing is collective.
    """

    is_captured = True
    runs_whole_steps = False

    def __init__(
        self,
        parts: Mapping[int, nn.Module],
        schedule: Schedule,
        *,
        loss_fn: LossFunction,
        activation: Callable[[MicrobatchInputs], torch.Tensor | ActivationSignature],
        pipeline_group: dist.ProcessGroup,
        new_passes: Callable[[int], StagePasses],
        device: torch.device,
        max_unsharded_bytes: int | None = None,
        shared_groups: Sequence[SharedGroup] = (),
        ep_overlap: EpOverlapConfig | None = None,
        verify: bool = True,
        capture_layers: CaptureLayers = "auto",
        on_shape_change: ShapeChangePolicy = "error",
    ) -> None:
        self._parts = parts
        self._schedule = schedule
        self._loss_fn = loss_fn
        self._activation = activation
        self._pipeline_group = pipeline_group
        self._new_passes = new_passes
        self._device = device
        self._max_unsharded_bytes = max_unsharded_bytes
        self._shared_groups = tuple(shared_groups)
        self._ep_overlap = ep_overlap or EpOverlapConfig()
        self._verify = verify
        self._capture_layers = capture_layers
        self._on_shape_change = on_shape_change
        self._runners: dict[tuple[object, ...], GraphPPRunner] = {}
        """By the shapes of microbatches."""

        self._clock = StartupClock()
        self._on_capture: Callable[[StageCaptureReport], None] = lambda report: None
        self._artifacts: RunArtifacts | None = None
        self.input_preparers: Sequence[InputPreparer] = ()
        """Hooks on the inputs of captures, set before the first one."""

        self.run: ForwardBackward = _unattached
        self.reports: tuple[StageCaptureReport, ...] = ()
        self.stages: dict[int, GraphPipelineStage] = {}
        """This rank's stages by index, once captured: those of the first shapes."""

    def attach(
        self,
        *,
        run: ForwardBackward,
        clock: StartupClock,
        on_capture: Callable[[StageCaptureReport], None],
        artifacts: RunArtifacts | None = None,
    ) -> None:
        """Tell what there was not yet when torchtitan had this built: its trainer.

        Args:
            run: torchtitan's ``forward_backward_step``, which calls ``step``.
            clock: counts capture and passes as parts of the start-up.
            on_capture: called after the capture of each stage.
            artifacts: where graphs are looked for and stored; None: every rank captures for itself.
        """
        self.run = run
        self._clock = clock
        self._on_capture = on_capture
        self._artifacts = artifacts

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
        passes = self._new_passes(stage_index)
        options = self._options(stage_index, microbatch)
        generating: AbstractContextManager[None] = nullcontext()
        if self._artifacts is None:
            captured = self._trace(part, passes, fake_mode=fake_mode, **options)
        else:
            asked = self._to_store(part, passes, options, fake_mode, self._artifacts)
            counts = {
                len(self._schedule.stages_of_rank(rank)) for rank in range(self._schedule.num_ranks)
            }
            shared = self._artifacts.obtain(
                asked.graph,
                # Together only if all have as many stages to ask for.
                is_first=not self._runners and len(counts) == 1,
                **asked.identified_by,
            )
            captured = shared.captured
            generating = self._artifacts.generating_code(
                shared, model=part, part=f"stage {stage_index}"
            )
            if captured.is_loaded:
                passes.take_reports(captured.passes)
        with self._clock.part("passes"), generating:
            stage = GraphPipelineStage(
                part,
                transform=passes.rewrite,
                generate_code=passes.generate_code if passes.generates_code else None,
                rewritten=captured.rewritten,
                trace=layer_tracer(self._capture_layers, lambda report: None),
                **options,
            )
        report = StageCaptureReport(
            num_stages=self._schedule.num_stages,
            actions=tuple(stage.actions.values()),
            passes=tuple(each for _, each in passes.reports),
            stamping=captured.stamping,
            is_loaded=captured.is_loaded,
        )
        self.reports = (*self.reports, report)
        self._on_capture(report)
        return stage

    def to_store(
        self,
        stage_index: int,
        part: nn.Module,
        microbatch: MicrobatchInputs,
        artifacts: RunArtifacts,
    ) -> StageToStore:
        """A stage as it would be stored, for whoever runs none.

        Args:
            stage_index: as for ``capture``; so are the next two.
            part: see ``stage_index``.
            microbatch: see ``stage_index``.
            artifacts: of the run.
        """
        passes, options = self._new_passes(stage_index), self._options(stage_index, microbatch)
        return self._to_store(part, passes, options, None, artifacts)

    def _options(self, stage_index: int, microbatch: MicrobatchInputs) -> dict[str, Any]:
        """What a stage is captured with, whoever traces it."""
        num_stages = self._schedule.num_stages
        return {
            "stage_index": stage_index,
            "num_stages": num_stages,
            "activations": () if stage_index == 0 else (self._activation(microbatch),),
            "inputs": microbatch,
            "loss_fn": _stage_loss(self._loss_fn) if stage_index == num_stages - 1 else None,
            "device": self._device,
            "verify": self._verify,
            "input_preparers": for_stages(self.input_preparers),
        }

    def _trace(
        self, part: nn.Module, passes: StagePasses, *, verify: bool, **options: Any
    ) -> CapturedStage:
        """Capture a stage, cut it, and run the passes that generate no code."""
        stamped: list[CaptureLayersReport] = []
        with (
            self._clock.part("capture"),
            annotate_expert_regions(part),
            chunked_for_capture(part, self._ep_overlap, is_stage=True) as chunked,
        ):
            capture = capture_stage(
                part,
                verify=verify,
                trace=layer_tracer(self._capture_layers, stamped.append),
                **options,
            )
            roots = chunked.roots if chunked is not None else ()
            settle_chunk_annotations(capture.traced.graph_module, roots=roots)
            passes.on_capture(capture)
            rewritten = rewrite_stage(capture, transform=passes.rewrite, verify=verify)
        return CapturedStage(
            rewritten=rewritten,
            passes=passes.reports,
            stamping=stamped[-1] if stamped else None,  # the forward was traced before
        )

    def _to_store(
        self,
        part: nn.Module,
        passes: StagePasses,
        options: Mapping[str, Any],
        fake_mode: Any,
        artifacts: RunArtifacts,
    ) -> StageToStore:
        names = StageNames.of(
            part, stage_index=options["stage_index"], num_stages=options["num_stages"]
        )
        facts = {
            "num_stages": options["num_stages"],
            "num_live_microbatches": passes.num_live_microbatches,
        }
        microbatch: MicrobatchInputs = options["inputs"]
        is_last = options["loss_fn"] is not None
        taken = (  # of what the rank is given, for any of its stages
            microbatch.args if options["stage_index"] == 0 else (),
            dict(microbatch.kwargs),
            microbatch.target if is_last else None,
        )
        return StageToStore(
            graph=StoredStage(
                trace=lambda: self._trace(part, passes, fake_mode=fake_mode, **options),
                model=part,
                names=names,
                axes=artifacts.axes(part),
                clock=self._clock,
                fake_mode=fake_mode,
            ),
            identified_by={
                "passes": passes.all_passes(),
                "model": part,
                "loss_fn": self._loss_fn if is_last else None,
                "arguments": (facts, options["activations"], *taken),
                "num_microbatches": self._schedule.num_microbatches,
                "stage": names,
            },
        )

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
        shapes = _shapes(microbatches[0]) if self._on_shape_change == "recapture" else ()
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
    """Where their graphs communicate, and so wait for ranks of a step that fails.

    Read off the graphs: a plan has axes, and groups of several axes, that torchtitan's meshes lack.
    """
    names = {name: None for stage in stages for name in stage.group_names()}
    return [process_group_named(name) for name in names]


def _shapes(microbatch: MicrobatchInputs) -> tuple[object, ...]:
    """What a graph is captured for, of what every rank of a pipeline is given."""
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
