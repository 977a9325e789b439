"""torchtitan's trainer, with the forward and backward of a step as one captured graph.

Only the forward/backward step is overridden. Model building, parallelization, optimizer,
schedules, checkpoints, metrics, validation and the loop itself are torchtitan's
(torchtitan/trainer.py, 0.3.0), configured and not copied.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import distributed as dist
from torchtitan.components.validate import Validator
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools import filesystem
from torchtitan.trainer import Trainer

from gt_trainer.compile_options import TrainerCompileConfig
from gt_trainer.decoder.attention import attention_mask_for
from gt_trainer.metrics.metrics_jsonl import GraphMetricsProcessor
from gt_trainer.model_identity import identity_of, write_identity
from gt_trainer.placement.planned_step import loss_of
from gt_trainer.startup import StartupClock
from gt_trainer.steps.capture_log import CaptureLog
from gt_trainer.steps.gradients import refuse_non_finite_gradients
from gt_trainer.steps.new_training_step import StepParts, new_training_step
from gt_trainer.steps.training_step import Batch, BatchPreparation, TrainingStep
from gt_trainer.validator import GraphValidator


class GraphTrainer(Trainer):
    """Trains with captured steps (``compile.mode`` aot_fx_trace, aot_joint) or eagerly (none).

    All modes run the same model, placed the same way; losses and gradients agree bit for bit, but
    for the order in which gloo adds bucketed gradients of three ranks or more.
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
        assert config.model_spec is not None
        self._model_identity = identity_of(config.model_spec)
        self.startup = StartupClock()
        with self.startup.part("setup"):
            super().__init__(config)
            if config.compile.autoparallel and config.validator.enable:
                self._allow_validation()
        self.optimizers.register_step_pre_hook(self._check_gradients)
        self._has_stepped = False
        self.training_step: TrainingStep = new_training_step(self._step_parts(config))
        """Forward, loss and backward of one batch."""

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
        input_dict: Batch | list[Batch],
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
        return self.training_step.run(
            input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
        )

    def train_step(self, data_iterator: Any) -> None:
        """As torchtitan's; the first one ends the start-up, whose parts it writes down."""
        if not self._has_stepped and isinstance(self.metrics_processor, GraphMetricsProcessor):
            # Not before: the checkpoint that is resumed has only now said where it left off.
            self.metrics_processor.training_starts(after_step=self.step - 1)
            if self.training_step.is_captured:
                self.metrics_processor.display.phase("capturing")
        if not self._has_stepped:
            self._say_whose_checkpoints()
        self._has_stepped = True
        super().train_step(data_iterator)
        is_first_rank = dist.get_rank() == 0
        path = Path(self.config.dump_folder) / "startup.json" if is_first_rank else None
        self.startup.finish(path)

    def close(self) -> None:
        """As torchtitan's; first what holds on to process groups: pipelines, CUDA graphs."""
        self.training_step.close()
        super().close()

    def _say_whose_checkpoints(self) -> None:
        """Not before what is resumed has been loaded: only then it is known to be of this model."""
        checkpoint = self.config.checkpoint
        folder = filesystem.join(self.config.dump_folder, checkpoint.folder)
        is_saved = checkpoint.enable and not checkpoint.load_only
        if is_saved and dist.get_rank() == 0 and not filesystem.is_remote(folder):
            write_identity(Path(folder), self._model_identity)

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

    def _step_parts(self, config: Config) -> StepParts:
        return StepParts(
            options=config.compile,
            model_parts=self.model_parts,
            loss_fn=self.loss_fn,
            run_eagerly=super().forward_backward_step,
            schedule=self.pp_schedule if self.parallel_dims.pp_enabled else None,
            preparation=BatchPreparation(
                split=self.post_dataloading_process, context=self.train_context
            ),
            parallel_dims=self.parallel_dims,
            reshard_after_forward=config.parallelism.fsdp_reshard_after_forward,
            dump_folder=Path(config.dump_folder),
            clock=self.startup,
            on_capture=CaptureLog(in_detail=config.compile.debug_graph_passes),
        )
