"""The configuration of a run that trains the model of a Hugging Face folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from gt_trainer.data.text_dataloader import StdlibTextDataLoader
from gt_trainer.models.adapt import adapt_published, say_once
from gt_trainer.models.hugging_face.causal_model import (
    CausalModel,
    CausalModelAdapter,
    UncomputedBufferError,
    build_on_meta,
    computed_buffers,
    parallelize_causal_model,
    tied_names,
    transformers_config,
)
from gt_trainer.models.hugging_face.folder import CONFIG, read_weights
from gt_trainer.trainer import GraphTrainer
from gt_trainer.validator import GraphValidator

_SEQ_LEN = 256
_STEPS = 20
_BATCH_SIZE = 2
_LEARNING_RATE = 3e-4
_SEED = 42
_MAX_TOLD = 4
_DYNAMIC_ROPE = ("dynamic", "longrope")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class UntrainableFolderError(ValueError):
    """A folder whose model cannot be trained here, with every reason."""


def hugging_face_configuration(folder: Path) -> GraphTrainer.Config:
    """20 steps of 2 x 256 tokens, from the folder's weights or, if it has none, from drawn ones.

    Args:
        folder: One in which ``folder_problems`` finds nothing.

    Raises:
        UntrainableFolderError: Names everything that stands in the way.
    """
    config_json = (folder / CONFIG).read_text(encoding="utf-8")
    try:
        config = transformers_config(config_json)
        model = build_on_meta(config_json)
    except Exception as error:  # noqa: BLE001  # whatever transformers finds wrong with it
        raise UntrainableFolderError(f"transformers builds no model of it: {error}") from None
    shapes = read_weights(folder)
    reasons = [*_obstacles(config, model), *_wrong_weights(model, shapes)]
    if reasons:
        raise UntrainableFolderError("; ".join(reasons))
    text = config.get_text_config()
    spec = ModelSpec(
        name=text.model_type,
        flavor=folder.name,
        model=CausalModel.Config(
            config_json=config_json,
            vocab_size=text.vocab_size,
            max_seq_len=text.max_position_embeddings,
        ),
        parallelize_fn=parallelize_causal_model,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=CausalModelAdapter,
    )
    _say_dropout(config)
    return dataclasses.replace(
        adapt_published(_run_of(spec, folder, has_weights=bool(shapes))),
        model_spec=spec,
    )


def _run_of(spec: ModelSpec, folder: Path, *, has_weights: bool) -> Trainer.Config:
    return Trainer.Config(
        model_spec=spec,
        hf_assets_path=str(folder),
        tokenizer=HuggingFaceTokenizer.Config(),
        dataloader=StdlibTextDataLoader.Config(),
        optimizer=default_adamw(lr=_LEARNING_RATE),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=_BATCH_SIZE,
            seq_len=min(_SEQ_LEN, _positions(spec)),
            steps=_STEPS,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        checkpoint=CheckpointManager.Config(
            enable=True,
            interval=_STEPS,
            last_save_model_only=False,
            initial_load_in_hf=has_weights,
        ),
        validator=GraphValidator.Config(
            enable=False,
            freq=10,
            steps=2,
            dataloader=StdlibTextDataLoader.Config(split="validation"),
        ),
        debug=DebugConfig(seed=_SEED),
        loss=CrossEntropyLoss.Config(),
    )


def _positions(spec: ModelSpec) -> int:
    model = spec.model
    assert isinstance(model, CausalModel.Config)
    return model.max_seq_len


def _obstacles(config: Any, model: Any) -> Iterator[str]:
    kind, text = type(model).__name__, config.get_text_config()
    if text is not config:
        yield f"{kind} reads more than text"
    if getattr(text, "max_position_embeddings", None) is None:
        yield f"{CONFIG} has no max_position_embeddings"
    if model._is_stateful or not model._supports_sdpa:
        yield f"{kind} mixes tokens otherwise than by attention under a mask, across documents too"
    windows = {*(getattr(text, "layer_types", None) or ())} - {"full_attention"}
    if windows or getattr(text, "sliding_window", None) is not None:
        yield (
            f"{kind} has windows of attention, which the mask of documents that it is given lacks"
        )
    if any((getattr(text, name, None) or 0) > 1 for name in _EXPERTS):
        yield f"{kind} has experts, whose loss that balances them is no part of the step"
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in _DYNAMIC_ROPE:
        yield f"{kind} has rotary embeddings ({rope['rope_type']}) that change with the positions"
    try:
        computed_buffers(model)
    except UncomputedBufferError as error:
        yield str(error)


def _wrong_weights(model: Any, shapes: dict[str, tuple[int, ...]]) -> Iterator[str]:
    if not shapes:
        return
    twins = tied_names(model)
    wanted = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    wrong = [
        f"{name} {shapes.get(name, 'none')} (the model: {shape})"
        for name, shape in wanted.items()
        if name not in twins and shapes.get(name) != shape
    ]
    if wrong:
        more = f", {len(wrong) - _MAX_TOLD} more" if len(wrong) > _MAX_TOLD else ""
        yield f"its weights are not the model's: {', '.join(wrong[:_MAX_TOLD])}{more}"


def _say_dropout(config: Any) -> None:
    dropped = [
        name
        for name, value in config.to_dict().items()
        if ("dropout" in name or name.endswith("_pdrop"))
        and isinstance(value, float)
        and value > 0
        and not name.startswith("summary_")
    ]
    if dropped:
        say_once(f"nothing is dropped out in training: {', '.join(dropped)} of {CONFIG} is left")
