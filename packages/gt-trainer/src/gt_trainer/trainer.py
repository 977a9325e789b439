"""torchtitan's trainer, with the forward and backward of a step as one captured graph.

Only the forward/backward step is overridden. Model building, parallelization, optimizer,
schedules, checkpoints, metrics, validation and the loop itself are torchtitan's
(torchtitan/trainer.py, 0.3.0), configured and not copied.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import distributed as dist
from torch import nn
from torchtitan.components.validate import Validator
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from gt_passes import (
    GroupPurpose,
    MemoryProfile,
    PipelineReport,
    estimate_memory,
    release_cuda_graphs,
    residency_table,
    second_group_of,
)
from gt_trainer.compile_options import TrainerCompileConfig
from gt_trainer.metrics.metrics_jsonl import GraphMetricsProcessor
from gt_trainer.metrics.startup import StartupClock
from gt_trainer.models.attention import attention_mask_for
from gt_trainer.placement.planned_capture import capture_layers_of
from gt_trainer.placement.planned_loss import loss_of
from gt_trainer.steps.captured_step import CapturedTrainingStep, CaptureReport, Recipe
from gt_trainer.steps.gradients import accumulate_gradients, refuse_non_finite_gradients
from gt_trainer.steps.joint_step import JointCaptureReport, JointForward
from gt_trainer.steps.pass_refusals import explain_refusals
from gt_trainer.steps.pipelined_step import PipelinedStep, StageCaptureReport
from gt_trainer.steps.recipe import recipe_of
from gt_trainer.validator import GraphValidator


class GraphTrainer(Trainer):
    """Trains with captured steps (``compile.mode`` aot_fx_trace, aot_joint) or eagerly (none).

    All modes run the same model, placed the same way; losses and gradients agree bit for bit.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's configuration with this project's ``compile`` options."""

        compile: TrainerCompileConfig = field(  # type: ignore[assignment]  # answers what torchtitan's CompileConfig is asked
            default_factory=TrainerCompileConfig
        )
        validator: Validator.Config = field(default_factory=GraphValidator.Config)

    config: Config

    def __init__(self, config: Config) -> None:
        """Build everything that a training run needs; see torchtitan's ``Trainer``."""
        if config.parallelism.pipeline_parallel_degree > 1:
            # Else torchtitan warns of a loss that nobody sees; our display is where the loss is.
            ranks = range(int(os.environ.get("WORLD_SIZE", "1")))
            os.environ.setdefault("LOG_RANK", ",".join(map(str, ranks)))
        if config.compile.autoparallel:
            config = replace(config, loss=loss_of(config))
        self.startup = StartupClock()
        with self.startup.part("setup"):
            super().__init__(config)
            if config.compile.autoparallel and config.validator.enable:
                self._allow_validation()
        self.optimizers.register_step_pre_hook(self._check_gradients)
        self.captures: list[CaptureReport | JointCaptureReport] = []
        """One report for each capture so far, oldest first."""
        self._captured: CapturedTrainingStep | None = None
        self._joint: JointForward | None = None
        self._has_stepped = False
        if self.parallel_dims.pp_enabled and isinstance(self.pp_schedule, PipelinedStep):
            self.pp_schedule.report_to(self.startup, self._report_stage)

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """As torchtitan's, plus the mask of documents where the model's attention takes one.

        Args:
            input_dict: "input" (B, L) token ids and "positions" (B, L).
            labels: (B, L) token ids.
        """
        inputs, labels, extra_kwargs = super().post_dataloading_process(input_dict, labels)
        mask = attention_mask_for(self.model_config, extra_kwargs.get("positions"))
        if mask is not None:
            extra_kwargs["attention_masks"] = mask
        return inputs, labels, extra_kwargs

    def forward_backward_step(
        self,
        *,
        input_dict: dict[str, torch.Tensor] | list[dict[str, torch.Tensor]],
        labels: torch.Tensor | list[torch.Tensor],
        global_valid_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Run forward, loss and backward of one batch, and accumulate the gradients.

        Args:
            input_dict: "input" (B, L) and "positions" (B, L) of this rank's batch.
            labels: (B, L).
            global_valid_tokens: scalar, tokens of the whole step over all ranks.

        Returns:
            This rank's share of the mean loss, a scalar.
        """
        if self.config.compile.mode == "none" or self.parallel_dims.pp_enabled:
            # Of a pipeline, torchtitan calls the schedule, which knows whether it is captured.
            return super().forward_backward_step(
                input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
            )
        assert isinstance(input_dict, dict)
        assert isinstance(labels, torch.Tensor)
        inputs, labels, extra_kwargs = self.post_dataloading_process(input_dict, labels)
        if self.config.compile.mode == "aot_joint":
            with self._joint_model():
                return self.fwd_bwd_fn(inputs, labels, global_valid_tokens, extra_kwargs)
        if self._captured is None:
            self._captured = self._new_captured_step()
        with self.train_context():
            loss, gradients = self._captured(inputs, labels, global_valid_tokens, extra_kwargs)
        parameters = [p for p in self.model_parts[0].parameters() if p.requires_grad]
        accumulate_gradients(parameters, gradients)
        return loss

    @contextmanager
    def _joint_model(self) -> Iterator[None]:
        """Inside, torchtitan's own forward, loss and backward call the captured forward."""
        if self._joint is None:
            self._joint = self._new_joint_forward()
        models = self.model_parts
        # torchtitan only calls it: what else it asks of a model, it asks outside.
        self.model_parts = [cast("nn.Module", self._joint)]
        try:
            yield
        finally:
            self.model_parts = models

    def train_step(self, data_iterator: Any) -> None:
        """As torchtitan's; the first one ends the start-up, whose parts it writes down."""
        if not self._has_stepped and isinstance(self.metrics_processor, GraphMetricsProcessor):
            # Not before: the checkpoint that is resumed has only now said where it left off.
            self.metrics_processor.training_starts(after_step=self.step - 1)
            if self.config.compile.mode != "none":
                self.metrics_processor.display.phase("capturing")
        self._has_stepped = True
        super().train_step(data_iterator)
        is_first_rank = dist.get_rank() == 0
        path = Path(self.config.dump_folder) / "startup.json" if is_first_rank else None
        self.startup.finish(path)

    def close(self) -> None:
        """As torchtitan's; first what holds on to process groups: pipelines, CUDA graphs."""
        if self.parallel_dims.pp_enabled and isinstance(self.pp_schedule, PipelinedStep):
            self.pp_schedule.close()
        for report in self.captures:
            for graph_module in report.graph_modules:
                release_cuda_graphs(graph_module)
        super().close()

    def _check_gradients(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        parameters = (p for part in self.model_parts for p in part.parameters())
        refuse_non_finite_gradients(parameters, step=self.step, device=self.device)

    def _allow_validation(self) -> None:
        # Imported here: no other run pays for the planner.
        from gt_trainer.placement.evaluation import allow_validation

        allow_validation(
            cast("Decoder", self.model_parts[0]),
            parallel_dims=self.parallel_dims,
            training=self.config.training,
        )

    def _new_captured_step(self) -> CapturedTrainingStep:
        return CapturedTrainingStep(
            self.model_parts[0],
            self.loss_fn,
            recipe=self._recipe(),
            on_shape_change=self.config.compile.on_shape_change,
            clock=self.startup,
            on_capture=self._report_capture,
            ep_overlap=self.config.compile.ep_overlap,
            capture_layers=capture_layers_of(self.config.compile),
        )

    def _new_joint_forward(self) -> JointForward:
        options = self.config.compile
        return JointForward(
            self.model_parts[0],
            partitioner=options.joint_partitioner,
            recipe=self._recipe(),
            on_shape_change=options.on_shape_change,
            clock=self.startup,
            on_capture=self._report_joint_capture,
        )

    def _recipe(self) -> Recipe:
        self._create_second_groups()
        return recipe_of(
            self.config.compile,
            reshard_after_forward=self.config.parallelism.fsdp_reshard_after_forward,
            debug_folder=Path(self.config.dump_folder) / "graph_passes" / f"rank_{dist.get_rank()}",
        )

    def _create_second_groups(self) -> None:
        """Create the groups that passes move collectives to, where all ranks still do the same.

        Else a rank whose capture fails would leave the others waiting for it to join a group.
        """
        options = self.config.compile
        wanted: list[tuple[str, GroupPurpose]] = []
        if options.fsdp_second_group:
            wanted += [("fsdp", "reductions"), ("efsdp", "reductions")]
        if options.ep_overlap.enabled:
            wanted += [("ep", "exchanges")]
        for axis, purpose in wanted:
            mesh = self.parallel_dims.get_optional_mesh(axis)
            if mesh is not None:
                second_group_of(mesh.get_group().group_name, purpose=purpose)

    def _report_stage(self, report: StageCaptureReport) -> None:
        logger.info(str(report))
        for passes in report.passes:
            self._report_passes(passes)

    def _report_joint_capture(self, report: JointCaptureReport) -> None:
        self.captures.append(report)
        logger.info(
            f"Captured the model: {report.num_nodes_forward:,} operators forward and "
            f"{report.num_nodes_backward:,} backward after "
            f"{len(report.forward_passes.records)} passes on each"
        )
        self._report_passes(report.forward_passes)
        self._report_passes(report.backward_passes)

    def _report_capture(self, report: CaptureReport) -> None:
        self.captures.append(report)
        logger.info(
            f"Captured the training step: {report.num_nodes:,} operators after "
            f"{len(report.passes.records)} passes"
        )
        self._report_passes(report.passes)
        if self.config.compile.debug_graph_passes and dist.get_rank() == 0:
            logger.info(
                f"Kept for the backward:\n{residency_table(report.traced.graph_module)}\n"
                f"Estimated memory:\n{self._estimated_memory(report)}"
            )

    def _estimated_memory(self, report: CaptureReport) -> MemoryProfile:
        traced = report.traced
        return estimate_memory(traced.graph_module, num_static_inputs=traced.num_static_inputs)

    def _report_passes(self, report: PipelineReport) -> None:
        """What the user asked for and did not get, with the reasons; all of it when debugging."""
        if dist.get_rank() != 0:
            return
        for line in explain_refusals(report):
            logger.warning(line)
        if self.config.compile.debug_graph_passes:
            logger.info(f"Graph passes:\n{report}\n{report.differences()}")
