"""torchtitan's trainer, with the forward and backward of a step as one captured graph.

A step is ours: its forward and backward, and what stands around them, which waits for the device
only where a step is reported. Model building, parallelization, optimizer, schedules, checkpoints,
metrics, validation and the loop over steps are torchtitan's (torchtitan/trainer.py, 0.3.0),
configured and not copied.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import distributed as dist
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.validate import Validator
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.decoder import Decoder
from torchtitan.observability import structured_logger as sl
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from gt_trace import InputPreparer
from gt_trainer.artifacts.run_identity import Machine, RunSettings, topology_of_run
from gt_trainer.checkpoints.manager import CheckedCheckpointManager
from gt_trainer.compile_options import TrainerCompileConfig, chosen_options
from gt_trainer.context_parallel.batch_of_rank import batch_of_rank
from gt_trainer.context_parallel.ring_masks import ring_masks
from gt_trainer.context_parallel.token_order import load_balancer_of
from gt_trainer.decoder.attention import attention_mask_for, has_document_mask
from gt_trainer.device_transfer import copy_to_host, local_part, send_to_device
from gt_trainer.local_update import clip_gradients, update_parameters
from gt_trainer.metrics.metrics_history import record_start
from gt_trainer.metrics.metrics_jsonl import GraphMetricsProcessor
from gt_trainer.model_identity import identity_of, write_identity
from gt_trainer.parallelism_options import TrainerParallelismConfig, with_own_options
from gt_trainer.pipelines.pipeline_plan import PipelinePlan, pipeline_plan
from gt_trainer.pipelines.tied_weight import TiedSchedule, settle_tied_weight
from gt_trainer.placement.kept_plan import (
    BY_HAND_FILE,
    PLAN_FILE,
    keep_plan,
    plan_file_of,
    with_plan_file,
)
from gt_trainer.placement.planned_loss import LossOfParts, loss_of
from gt_trainer.quantization.quantization_options import QuantizationConfig
from gt_trainer.quantization.quantized_model import with_quantized_model
from gt_trainer.run_files import CAPTURES_FILE, STARTUP_FILE
from gt_trainer.startup import StartupClock
from gt_trainer.steps.capture_log import CaptureLog
from gt_trainer.steps.new_training_step import StepParts, new_training_step
from gt_trainer.steps.step_check import StepCheck
from gt_trainer.steps.training_step import Batch, BatchPreparation, TrainingStep
from gt_trainer.validator import GraphValidator


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepBatches:
    groups: list[list[tuple[Batch, torch.Tensor]]]
    """One group for each forward/backward, of its microbatches: inputs and labels, on the host."""

    local_valid_tokens: torch.Tensor
    """Scalar on the host: labels of this rank that count."""

    global_valid_tokens: torch.Tensor
    """The same over all data-parallel ranks, on the device."""


class GraphTrainer(Trainer):
    """Trains with captured steps (``compile.mode`` aot_fx_trace, aot_joint) or eagerly (none).

    All modes run the same model, placed the same way. Losses and gradients agree bit for bit,
    except where docs/numerics.md says so.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's configuration with this project's ``compile`` options."""

        parallelism: TrainerParallelismConfig = field(default_factory=TrainerParallelismConfig)
        compile: TrainerCompileConfig = field(  # type: ignore[assignment]  # answers what torchtitan's CompileConfig is asked
            default_factory=TrainerCompileConfig
        )
        validator: Validator.Config = field(default_factory=GraphValidator.Config)
        quantization: QuantizationConfig = field(default_factory=QuantizationConfig)

        def __post_init__(self) -> None:
            # Not ``super()``: dataclasses with slots are other classes than the ones written here.
            Trainer.Config.__post_init__(self)
            self.parallelism = with_own_options(self.parallelism)
            if type(self.checkpoint) is CheckpointManager.Config:
                self.checkpoint = CheckedCheckpointManager.Config.like(self.checkpoint)

    config: Config

    def __init__(self, config: Config) -> None:
        """Build everything that a training run needs; see torchtitan's ``Trainer``."""
        if config.parallelism.pipeline_parallel_degree > 1:
            # Else torchtitan warns of a loss that nobody sees; our display is where the loss is.
            ranks = range(int(os.environ.get("WORLD_SIZE", "1")))
            os.environ.setdefault("LOG_RANK", ",".join(map(str, ranks)))
        if config.compile.autoparallel:
            options = with_plan_file(config.compile, plan_file_of(config))
            config = replace(config, loss=loss_of(config), compile=options)
        assert config.model_spec is not None
        # As it is before it is quantized: checkpoints are the same.
        self._model_identity = identity_of(config.model_spec)
        config = with_quantized_model(config)
        self.startup = StartupClock()
        with self.startup.part("setup"):
            super().__init__(config)
            if isinstance(self.loss_fn, LossOfParts):
                self.loss_fn.set_ranks(self.parallel_dims)
            self._kept_file: tuple[str, bytes] | None = None
            if config.compile.autoparallel and dist.get_rank() == 0:
                plan = (Path(config.dump_folder) / PLAN_FILE).read_bytes()
                self._kept_file = PLAN_FILE, plan
            if config.compile.autoparallel and config.validator.enable:
                self._allow_validation()
            if config.validator.enable and isinstance(self.validator, GraphValidator):
                self.validator.context_parallel = config.compile.context_parallel
        self._second_copies = self._settle_tied_weight()
        self._step_check = StepCheck(self.device)
        for part in self.model_parts:
            # Whatever saves parameters asks a model for them.
            part.register_state_dict_pre_hook(self._settle)  # type: ignore[no-untyped-call]  # PyTorch leaves it unannotated
        self._has_stepped = False
        if dist.get_rank() == 0:
            # Those of an earlier start.
            (Path(config.dump_folder) / CAPTURES_FILE).unlink(missing_ok=True)
        self.training_step: TrainingStep = new_training_step(self._step_parts(config))
        """Forward, loss and backward of one batch."""

    def init_distributed(self) -> ParallelDims:
        """As torchtitan's; the group may be there, if ranks had to agree on how to place."""
        if dist.is_initialized():
            return ParallelDims.from_config(self.config.parallelism, dist.get_world_size())
        return super().init_distributed()

    def keep_judgement(self, written: bytes) -> None:
        """Keep beside the checkpoints why this run is placed by hand; on rank 0.

        Args:
            written: the file, as ``written_judgement`` gives it.
        """
        self._kept_file = BY_HAND_FILE, written

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """As torchtitan's, plus the mask of documents where the model's attention takes one.

        Args:
            input_dict: "input" (B, L) token ids and "positions" (B, L).
            labels: (B, L) token ids.
        """
        if self.parallel_dims.cp_enabled and has_document_mask(self.model_config):
            shared = batch_of_rank(
                input_dict,
                labels,
                self.parallel_dims.get_mesh("cp"),
                load_balancer=load_balancer_of(
                    self.config.parallelism.context_parallel_load_balancer
                ),
                strategy=self.config.compile.context_parallel,
            )
            self.ntokens_seen += shared[1].numel()
            return shared
        inputs, labels, extra_kwargs = super().post_dataloading_process(input_dict, labels)
        mask = attention_mask_for(self.model_parts[0], extra_kwargs.get("positions"))
        if mask is not None:
            extra_kwargs["attention_masks"] = mask
        if self.parallel_dims.cp_enabled and self.config.compile.context_parallel == "ring":
            mesh = self.parallel_dims.get_mesh("cp")
            extra_kwargs["attention_masks"] = ring_masks(
                extra_kwargs["attention_masks"], num_ranks=mesh.size(), rank=mesh.get_local_rank()
            )
        return inputs, labels, extra_kwargs

    @classmethod
    def input_preparers(cls, config: GraphTrainer.Config) -> Sequence[InputPreparer]:
        """Return hooks on the inputs of captures; a derived trainer overrides it.

        A preparer gets the step's arguments: token ids (B, L), labels (B, L), the number of tokens
        of all ranks, and a dictionary of what else the model takes, such as positions and masks.
        Arguments that a capture does not take are None: labels and their number in
        ``--compile.mode aot_joint``, and, in a pipeline, tokens behind the first stage and labels
        before the last. Preparers run at each capture; those of pipeline stages twice.

        ``--dry-run`` and ``precompile`` ask the trainer whose ``Config`` the configuration is. A
        stored graph is used under equal preparers only: of equal class, source and attributes.
        ``--compile.mode none`` captures nothing, and refuses preparers.
        """
        return ()

    def forward_backward_step(
        self,
        *,
        input_dict: Batch | list[Batch],
        labels: torch.Tensor | list[torch.Tensor],
        global_valid_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Run forward, loss and backward of one batch, and accumulate the gradients.

        Args:
            input_dict: "input" (B, L) and "positions" (B, L) of this rank's batch; one for each
                microbatch with a pipeline, or where whole steps are run.
            labels: (B, L), likewise.
            global_valid_tokens: scalar, tokens of the whole step over all ranks.

        Returns:
            This rank's share of the mean loss, a scalar.
        """
        return self.training_step.run(
            input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
        )

    def train(self) -> None:
        """As torchtitan's; then what the device still owes is waited for, judged and written.

        Raises:
            NonFiniteGradientsError: Gradients of the last step were not finite.
            NonFiniteLossError: Its loss was not.
        """
        super().train()
        self._settle()

    def train_step(self, data_iterator: Any) -> None:
        """Make one update of the parameters, from as many batches as are accumulated.

        The first one ends the start-up, whose parts it writes down. It and the steps that are
        reported (``--metrics.log_freq``) wait for the device; of all others metrics.jsonl is told
        later.

        Args:
            data_iterator: yields ({"input", "positions"}, labels), each (B, L) on the host.

        Raises:
            NonFiniteGradientsError: Gradients were not finite: this step's, or on a GPU maybe those
                of the step before.
            NonFiniteLossError: The loss was not finite, likewise.
        """
        is_first = not self._has_stepped
        if is_first:
            self._first_step_begins()
        self.optimizers.zero_grad(set_to_none=self.config.training.disable_cuda_graphs)
        learning_rates = self.lr_schedulers.get_metrics()
        batches = self._next_batches(data_iterator)
        loss = self._accumulate(batches)
        with sl.log_trace_span("optim"):
            parameters = [p for part in self.model_parts for p in part.parameters()]
            grad_norm = clip_gradients(
                parameters,
                self.config.training.max_norm,
                second_copies=self._second_copies,
                pp_mesh=self.parallel_dims.get_optional_mesh("pp"),
                ep_enabled=self.parallel_dims.ep_enabled,
            )
            self._step_check.check(parameters, loss, step=self.step)
            self.checkpointer.maybe_wait_for_staging()
            update_parameters(self.optimizers)
            self.lr_schedulers.step()
        with sl.log_trace_span("collect_dist_metrics"):
            numbers = copy_to_host({**self._over_ranks(loss, batches), "grad_norm": grad_norm})
        if self.metrics_processor.should_log(self.step):
            self._step_check.settle()
            self._report(numbers.wait(), learning_rates)
        elif isinstance(self.metrics_processor, GraphMetricsProcessor):
            self.metrics_processor.log_later(self.step, numbers, learning_rates)
        if is_first:
            numbers.wait()
            path = Path(self.config.dump_folder) / STARTUP_FILE if dist.get_rank() == 0 else None
            self.startup.finish(path)

    def close(self) -> None:
        """As torchtitan's; first what holds on to process groups: pipelines, CUDA graphs."""
        self.training_step.close()
        if self.parallel_dims.pp_enabled and isinstance(self.pp_schedule, TiedSchedule):
            self.pp_schedule.close()
        super().close()

    def _settle_tied_weight(self) -> tuple[torch.nn.Parameter, ...]:
        """Make a weight that is tied across stages one; those of its copies that do not count."""
        model, parallel_dims = cast("Decoder.Config", self.model_config), self.parallel_dims
        if not parallel_dims.pp_enabled or not model.enable_weight_tying:
            return ()
        plan, parts = self._stages()
        return settle_tied_weight(parts, self.optimizers, plan, parallel_dims)

    def _stages(self) -> tuple[PipelinePlan, dict[int, torch.nn.Module]]:
        """The pipeline, and this rank's parts of the model by their stages."""
        plan = pipeline_plan(
            self.config.parallelism,
            num_layers=len(cast("Decoder.Config", self.model_config).layers),
            local_batch_size=self.config.training.local_batch_size,
        )
        pipeline_rank = self.parallel_dims.get_mesh("pp").get_local_rank()
        indices = plan.schedule.stages_of_rank(pipeline_rank)
        return plan, dict(zip(indices, self.model_parts, strict=True))

    def _say_whose_checkpoints(self) -> None:
        """Not before what is resumed has been loaded: only then it is known to be of this model."""
        checkpoint = self.config.checkpoint
        folder = filesystem.join(self.config.dump_folder, checkpoint.folder)
        if not checkpoint.enable or checkpoint.load_only or dist.get_rank() != 0:
            return
        if not filesystem.is_remote(folder):
            write_identity(Path(folder), self._model_identity)
        if self._kept_file is None:
            return
        name, written = self._kept_file
        if not keep_plan(self.config, written, name=name):
            how = (
                "the plan is not kept there: to go on with it, give "
                "--compile.autoparallel_solver.plan with a copy of placement.json"
                if name == PLAN_FILE
                else "what was judged is not kept there: to go on by hand, leave out "
                "--compile.autoparallel"
            )
            logger.warning(f"{folder} is remote, and {how}")

    def _first_step_begins(self) -> None:
        self._has_stepped = True
        if isinstance(self.metrics_processor, GraphMetricsProcessor):
            # Not before: the checkpoint that is resumed has only now said where it left off.
            self.metrics_processor.training_starts(after_step=self.step - 1)
            if self.training_step.is_captured:
                self.metrics_processor.display.phase("capturing")
        self._say_whose_checkpoints()
        if dist.get_rank() == 0:
            self._record_start()

    def _record_start(self) -> None:
        spec, options = self.config.model_spec, self.config.compile
        folder = Path(self.config.dump_folder)
        folder.mkdir(parents=True, exist_ok=True)
        facts: dict[str, object] = {
            "model": None if spec is None else f"{spec.name} {spec.flavor}",
            "device": self.device.type,
            "num_ranks": dist.get_world_size(),
            "last_step": self.config.training.steps,
            "compile": chosen_options(options),
        }
        record_start(folder, step=self.step, facts=facts)

    def _next_batches(self, data_iterator: Any) -> _StepBatches:
        groups: list[list[tuple[Batch, torch.Tensor]]] = []
        valid_tokens = torch.zeros((), dtype=torch.int64)
        for _ in range(self.gradient_accumulation_steps):
            group = []
            for _ in range(self.num_pipeline_parallel_microbatches):
                with sl.log_trace_span("fetching_batch"):
                    inputs, labels = next(data_iterator)
                valid_tokens += (labels != IGNORE_INDEX).sum()
                group.append((inputs, labels))
            groups.append(group)
        if self.training_step.runs_whole_steps:
            groups = [[each for group in groups for each in group]]
        sl.log_trace_scalar({"local_valid_tokens": cast("int", valid_tokens.tolist())})
        global_tokens = send_to_device(valid_tokens, self.device)
        if self.parallel_dims.dp_enabled:
            mesh = self.parallel_dims.get_mesh("batch")
            global_tokens = dist_utils.dist_sum_tensor(global_tokens, mesh)
        return _StepBatches(
            groups=groups, local_valid_tokens=valid_tokens, global_valid_tokens=global_tokens
        )

    def _accumulate(self, batches: _StepBatches) -> torch.Tensor:
        """Forward and backward of every group of microbatches; this rank's loss, a scalar."""
        total: torch.Tensor | None = None
        takes_several = self.parallel_dims.pp_enabled or self.training_step.runs_whole_steps
        for group in batches.groups:
            inputs = [
                {name: send_to_device(value, self.device) for name, value in each.items()}
                for each, _ in group
            ]
            labels = [send_to_device(each, self.device) for _, each in group]
            loss = self.forward_backward_step(
                input_dict=inputs if takes_several else inputs[0],
                labels=labels if takes_several else labels[0],
                global_valid_tokens=batches.global_valid_tokens,
            )
            # Copied: the memory may be a CUDA graph's, and the next replay's.
            total = loss.detach().clone() if total is None else total.add_(loss.detach())
        assert total is not None
        return local_part(total)

    def _over_ranks(self, loss: torch.Tensor, batches: _StepBatches) -> dict[str, torch.Tensor]:
        """The loss of a step, its largest over data-parallel ranks, and tokens seen so far."""
        seen = torch.full((), self.ntokens_seen, dtype=torch.int64, device=self.device)
        if not self.parallel_dims.dp_cp_enabled:
            return {"loss": loss, "max_loss": loss, "n_tokens_seen": seen}
        mesh = self.parallel_dims.get_mesh("loss")
        # A rank's loss is its sum over the tokens of all ranks; its mean is over its own, which it
        # may share with others.
        own = loss
        if self.parallel_dims.cp_enabled:
            own = dist_utils.dist_sum_tensor(loss, self.parallel_dims.get_mesh("cp"))
        largest = own * batches.global_valid_tokens / batches.local_valid_tokens
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
        return {
            "loss": dist_utils.dist_sum_tensor(loss, mesh),
            "max_loss": largest,
            "n_tokens_seen": dist_utils.dist_sum_tensor(seen, mesh),
        }

    def _report(self, numbers: dict[str, float], learning_rates: dict[str, float]) -> None:
        self.metrics_processor.log(
            self.step,
            numbers["loss"],
            numbers["max_loss"],
            numbers["grad_norm"],
            extra_metrics={"n_tokens_seen": numbers["n_tokens_seen"], **learning_rates},
        )

    def _settle(self, *_: Any) -> None:
        """Judge the last step and write its metrics, both waiting for the device."""
        self._step_check.settle()
        if isinstance(self.metrics_processor, GraphMetricsProcessor):
            self.metrics_processor.write_due()

    def _allow_validation(self) -> None:
        # Imported here: no other run pays for the planner.
        from gt_trainer.pipelines.evaluation import allow_validation, allow_validation_of_stages

        if self.parallel_dims.pp_enabled:
            plan, parts = self._stages()
            allow_validation_of_stages(
                parts,
                plan,
                cast("Decoder.Config", self.model_config),
                parallel_dims=self.parallel_dims,
                training=self.config.training,
                microbatch_size=self.config.parallelism.pipeline_parallel_microbatch_size,
            )
            return
        allow_validation(
            cast("Decoder", self.model_parts[0]),
            parallel_dims=self.parallel_dims,
            training=self.config.training,
        )

    def _step_parts(self, config: Config) -> StepParts:
        preparers = self.input_preparers(config)
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
            settings=RunSettings(
                compile=config.compile,
                topology=topology_of_run(self.parallel_dims, config.training, config.parallelism),
                model=self.model_config,
                loss=config.loss,
                parallelism=config.parallelism,
                training=config.training,
                debug=config.debug,
                machine=Machine.here(self.device),
                input_preparers=preparers,
            ),
            device=self.device,
            reshard_after_forward=config.parallelism.fsdp_reshard_after_forward,
            dump_folder=Path(config.dump_folder),
            clock=self.startup,
            on_capture=CaptureLog(
                Path(config.dump_folder) / CAPTURES_FILE,
                in_detail=config.compile.debug_graph_passes,
            ),
            input_preparers=preparers,
        )


def input_preparers_of(config: GraphTrainer.Config) -> Sequence[InputPreparer]:
    """Return the input preparers of the trainer that a configuration builds."""
    trainer = type(config)._owner
    assert trainer is not None
    assert issubclass(trainer, GraphTrainer)
    return trainer.input_preparers(config)
