"""Whatever decoder torchtitan has, or somebody made for it, from its published configuration.

Nothing is known here of any one model. Its configuration is read for what a captured step needs:
tokens in, logits out, shapes that stay. The rest is ``models.adapt``'s. What is not so is refused
with the reason.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.trainer import Trainer

from gt_trainer.data.text_dataloader import StdlibTextDataLoader
from gt_trainer.device import intended_device_type
from gt_trainer.models.adapt import adapt_debug, adapt_published, say_once
from gt_trainer.trainer import GraphTrainer

_ENCODERS = ("vision_encoder", "vision_adapter", "vision_projection", "perception_emb_norm")
"""Parts of a decoder that read images. A configuration may leave them out."""

_TEST_ASSETS = "./tests/assets/tokenizer"
"""Where torchtitan's debug configurations find a tokenizer: in its repository's root."""


_DEBUG_BATCH_SIZE = 2
"""Sequences of a step: experts that compute in bfloat16 in any precision are slow on a CPU."""


class UnadaptableError(ValueError):
    """A configuration of torchtitan's that cannot be trained here."""


def adapt_any(published: Trainer.Config) -> GraphTrainer.Config:
    """Make a configuration of torchtitan's one that Graph Trainer runs.

    A debug configuration, which expects to be started in torchtitan's repository, gets the text
    and the tokenizer that we ship, and trains as ``adapt_debug`` says.

    Args:
        published: Of a decoder. Not changed.

    Raises:
        UnadaptableError: Names everything that stands in the way.
    """
    reasons = list(_obstacles(published))
    if reasons:
        raise UnadaptableError("; ".join(reasons))
    adapted = copy.deepcopy(published)
    assert adapted.model_spec is not None
    model: Any = adapted.model_spec.model
    _read_text_alone(model, adapted.model_spec.name)
    if intended_device_type() != "cpu":
        _attend_with_flex_attention(model, adapted.model_spec.name)
    if published.hf_assets_path != _TEST_ASSETS:
        return adapt_published(adapted)
    return adapt_debug(
        dataclasses.replace(adapted, tokenizer=HuggingFaceTokenizer.Config()),
        learning_rate=_learning_rate(published),
        batch_size=_DEBUG_BATCH_SIZE,
    )


def _obstacles(published: Trainer.Config) -> Iterator[str]:
    extra = {field.name for field in dataclasses.fields(published)}
    extra -= {field.name for field in dataclasses.fields(Trainer.Config)}
    if extra:
        yield (
            f"it is a {type(published).__qualname__}, whose trainer reads "
            f"{', '.join(sorted(extra))}; Graph Trainer replaces torchtitan's common Trainer alone"
        )
    elif published._owner is not Trainer:
        yield (
            f"its trainer {_owner_name(published)} would not run: let it derive from "
            "gt_trainer.trainer.GraphTrainer in place of torchtitan's Trainer"
        )
    model = published.model_spec.model if published.model_spec is not None else None
    if not isinstance(model, Decoder.Config):
        yield (
            f"its model is {_name(model)}, which is no Decoder of torchtitan's: a step is captured "
            "from tokens to logits"
        )
        return
    linear = sum(getattr(layer, "delta_net", None) is not None for layer in model.layers)
    if linear:
        yield (
            f"{linear} of its {len(model.layers)} layers are GatedDeltaNet, whose kernels (FLA, in "
            "Triton) run on GPUs alone and take the offsets of documents as numbers, which differ "
            "in every batch where a graph has fixed ones"
        )
    has_images = any(getattr(model, name, None) is not None for name in _ENCODERS)
    is_debug = published.hf_assets_path == _TEST_ASSETS
    if has_images and not is_debug and not isinstance(published.dataloader, _TEXT):
        yield (
            f"its data are images ({_name(published.dataloader)}), of which every batch has "
            "another number where a graph has fixed shapes"
        )
    needed = [name for name in _ENCODERS if has_images and not _may_be_none(model, name)]
    if needed:
        yield f"{_name(model)} cannot be built without {', '.join(needed)}, and is given text alone"


def _owner_name(published: Trainer.Config) -> str:
    return getattr(published._owner, "__qualname__", repr(published._owner))


_TEXT: tuple[type[BaseDataLoader.Config], ...] = (
    HuggingFaceTextDataLoader.Config,
    StdlibTextDataLoader.Config,
)


def _may_be_none(model: Any, name: str) -> bool:
    if getattr(model, name, None) is None:
        return True
    return next(field.default is None for field in dataclasses.fields(model) if field.name == name)


def _read_text_alone(model: Any, name: str) -> None:
    left_out = [part for part in _ENCODERS if getattr(model, part, None) is not None]
    for part in left_out:
        setattr(model, part, None)
    if left_out:
        say_once(f"{name} is trained on text alone, without its {', '.join(left_out)}")


def _attend_with_flex_attention(model: Decoder.Config, name: str) -> None:
    found = list(model.traverse(VarlenAttention.Config))
    for _, _, parent, field in found:
        assert isinstance(field, str)
        setattr(parent, field, FlexAttention.Config())
    if found:
        say_once(
            f"{name} attends with FlexAttention in place of VarlenAttention, which takes the "
            "offsets of documents: another shape in every batch"
        )


def _learning_rate(published: Trainer.Config) -> float:
    """That of the parameters which no pattern before the last one names."""
    return float(published.optimizer.param_groups[-1].optimizer_kwargs["lr"])


def _name(config: object) -> str:
    return type(config).__qualname__.rpartition("<locals>.")[2].removesuffix(".Config")
