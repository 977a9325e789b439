"""Turn a configuration that torchtitan publishes into one that Graph Trainer runs.

The model, its sizes, the optimizer, the schedule and the data stay as published. What changes is
what capture needs: placement by ``parallelize``, the loss whose gradients come back through
autograd, and for recomputation and compilation the options of ``models.device_defaults``.
Whatever a user would notice is said in the log.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from typing import Any, cast

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.validate import Validator
from torchtitan.config import TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from gt_config.compile_config import MemoryPolicy
from gt_trainer.compile_options import TrainerCompileConfig
from gt_trainer.data.shipped_tokenizer import shipped_tokenizer_path
from gt_trainer.data.text_dataloader import StdlibTextDataLoader
from gt_trainer.decoder.attention import replace_inner_attention
from gt_trainer.decoder.chunked_loss import GraphChunkedLoss
from gt_trainer.decoder.experts import replace_inner_experts
from gt_trainer.decoder.tied_stages import adapter_of_stages, allow_tied_stages
from gt_trainer.device import intended_device_type
from gt_trainer.metrics.metrics_jsonl import GraphMetricsProcessor
from gt_trainer.models.device_defaults import default_options
from gt_trainer.parallelism_options import TrainerParallelismConfig
from gt_trainer.pipelines.split_model import pipeline
from gt_trainer.placement.parallelize import parallelize
from gt_trainer.trainer import GraphTrainer
from gt_trainer.validator import GraphValidator

_DEBUG_SEQ_LEN = 256
_DEBUG_STEPS = 20
_DEBUG_SEED = 42


def adapt_published(
    published: Trainer.Config, *, memory_policy: MemoryPolicy | None = None, **parallelism: Any
) -> GraphTrainer.Config:
    """Make a published configuration capturable; everything else stays.

    Args:
        published: What torchtitan's ``config_registry`` returns, or of a ``GraphTrainer`` of one's
            own: the result is then of its class. Not changed.
        memory_policy: As for ``default_options``.
        **parallelism: Fields of ``ParallelismConfig`` to set, such as degrees.
    """
    if published.model_spec is None:
        raise ValueError("the published configuration has no model_spec, hence no model")
    fields = {field.name: getattr(published, field.name) for field in dataclasses.fields(published)}
    options = default_options(published.activation_checkpoint, memory_policy=memory_policy)
    kind = GraphTrainer.Config
    if isinstance(published, GraphTrainer.Config):
        kind = type(published)
        options = options if published.compile == TrainerCompileConfig() else published.compile
    return kind(
        **fields
        | {
            "model_spec": _adapt_model(published.model_spec),
            "loss": _adapt_loss(published.loss),
            "metrics": _adapt_metrics(published.metrics),
            "validator": _adapt_validator(published.validator),
            "training": dataclasses.replace(published.training, disable_cuda_graphs=True),
            "parallelism": dataclasses.replace(
                published.parallelism, spmd_backend="partial_dtensor", **parallelism
            ),
            "activation_checkpoint": None,
            # torchtitan's are of torch.compile.
            "compile": options,
        }
    )


def is_as_published(config: GraphTrainer.Config) -> bool:
    """Whether its model is still placed as torchtitan does, which no capture records."""
    spec = config.model_spec
    return spec is not None and spec.parallelize_fn.__module__.partition(".")[0] == "torchtitan"


def with_positions(config: GraphTrainer.Config, positions: int) -> GraphTrainer.Config:
    """Let a model be built for longer sequences than it was trained for.

    Args:
        config: Of a model with rotary embeddings. Not changed.
        positions: Up to which position.
    """
    changed = copy.deepcopy(config)
    assert changed.model_spec is not None
    for layer in cast("Decoder.Config", changed.model_spec.model).layers:
        attention: Any = layer.attention
        attention.rope = dataclasses.replace(attention.rope, max_seq_len=positions)
    return changed


def adapt_debug(
    published: Trainer.Config, *, learning_rate: float, batch_size: int
) -> GraphTrainer.Config:
    """Make a published debug configuration train here and now: small batches of text at hand.

    20 steps of ``batch_size`` x 256 tokens in float32, from a fixed seed, on the Python standard
    library's sources with the tokenizer that we ship; a checkpoint at the end. The learning rate
    stays constant after two steps of warm-up: torchtitan's schedules depend on the number of steps,
    and a run that is resumed for more steps should be the run that never stopped.

    On CPU, routed experts compute in float32 too, which torchtitan's do not. Published sizes keep
    torchtitan's: on CPU they are only captured, for GPUs.

    Args:
        published: What torchtitan's ``config_registry`` returns. Not changed.
        learning_rate: Of AdamW.
        batch_size: Sequences of a step on each rank.
    """
    adapted = adapt_published(published)
    assert adapted.model_spec is not None
    if intended_device_type() == "cpu":
        _replace_experts(adapted.model_spec)
    return dataclasses.replace(
        adapted,
        hf_assets_path=str(shipped_tokenizer_path()),
        dataloader=StdlibTextDataLoader.Config(),
        optimizer=default_adamw(lr=learning_rate),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=batch_size,
            seq_len=_DEBUG_SEQ_LEN,
            steps=_DEBUG_STEPS,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=TrainerParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=_DEBUG_STEPS, last_save_model_only=False
        ),
        validator=GraphValidator.Config(
            enable=False,
            freq=10,
            steps=2,
            dataloader=StdlibTextDataLoader.Config(split="validation"),
        ),
        debug=DebugConfig(seed=_DEBUG_SEED),
    )


def _adapt_model(published: ModelSpec) -> ModelSpec:
    if intended_device_type() == "cpu":
        replaced = replace_inner_attention(published.model)
        if replaced:
            say_once(
                f"{' and '.join(replaced)} has no backward on cpu: {published.name} "
                f"{published.flavor} attends with DocumentCausalSDPA here"
            )
    adapted = dataclasses.replace(
        published,
        parallelize_fn=parallelize,
        pipelining_fn=pipeline if published.pipelining_fn is not None else None,
    )
    model, adapter = published.model, published.state_dict_adapter
    if not isinstance(model, Decoder.Config) or not model.enable_weight_tying:
        return adapted
    return dataclasses.replace(
        adapted,
        model=allow_tied_stages(model),
        state_dict_adapter=adapter_of_stages(adapter) if adapter is not None else None,
    )


def _replace_experts(spec: ModelSpec) -> None:
    if replace_inner_experts(spec.model):
        say_once(
            f"{spec.name} {spec.flavor} has experts that compute in the run's precision on cpu "
            "(--training.mixed_precision_param); torchtitan's compute in bfloat16 whatever it is"
        )


def _adapt_loss(published: BaseLoss.Config) -> BaseLoss.Config:
    if type(published) is not ChunkedLossWrapper.Config:
        return published
    return GraphChunkedLoss.Config(
        **{field.name: getattr(published, field.name) for field in dataclasses.fields(published)}
    )


def _adapt_metrics(published: MetricsProcessor.Config) -> GraphMetricsProcessor.Config:
    """Keep TensorBoard and the like. On CPUs, where nothing waits for it, report every step."""
    fields = {field.name: getattr(published, field.name) for field in dataclasses.fields(published)}
    if intended_device_type() == "cpu":
        fields["log_freq"] = 1
    return GraphMetricsProcessor.Config(**fields)


def _adapt_validator(published: Validator.Config) -> GraphValidator.Config:
    return GraphValidator.Config(
        **{field.name: getattr(published, field.name) for field in dataclasses.fields(published)}
    )


def say_once(line: str) -> None:
    """Log a line on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        logger.info(line)
