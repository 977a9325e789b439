"""Whatever decoder torchtitan has, or somebody made for it, from its published configuration.

Nothing is known here of any one model. Its configuration is read for what a captured step needs:
tokens in, logits out, shapes that stay. The rest is ``models.adapt``'s. What is not so is refused
with the reason.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, cast

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.trainer import Trainer

from gt_trainer.data.text_dataloader import StdlibTextDataLoader
from gt_trainer.decoder.own_masks import makes_own_masks
from gt_trainer.device import intended_device_type
from gt_trainer.models.adapt import adapt_debug, adapt_published, say_once
from gt_trainer.trainer import GraphTrainer

_ENCODERS = ("vision_encoder", "vision_adapter", "vision_projection", "perception_emb_norm")
"""Parts of a decoder that read images. A configuration may leave them out."""

_NO_WINDOW = (-1, 0)
"""All earlier tokens, and none later: torchtitan's default."""

_CHANGED_IN_DEBUG = (
    "hf_assets_path",
    "tokenizer",
    "dataloader",
    "optimizer",
    "lr_scheduler",
    "training",
    "parallelism",
    "checkpoint",
    "validator",
    "debug",
)
"""Fields that ``adapt_debug`` sets, and this module for it."""

_DEBUG_BATCH_SIZE = 2
"""Sequences of a step: experts that compute in bfloat16 in any precision are slow on a CPU."""


class UnadaptableError(ValueError):
    """A configuration of torchtitan's that cannot be trained here."""


def is_debug_configuration(module: str, function: str) -> bool:
    """Whether a configuration is one of torchtitan's own debug models.

    They expect to be started in torchtitan's repository, where their text and tokenizer are.

    Args:
        module: The Python module that it was loaded from.
        function: The name of the function that returned it.
    """
    return module.startswith("torchtitan.") and "_debugmodel" in function


def adapt_any(published: Trainer.Config, *, is_debug: bool) -> GraphTrainer.Config:
    """Make a configuration of torchtitan's one that Graph Trainer runs.

    Args:
        published: Of a decoder. Not changed.
        is_debug: Whether to train on the text and with the tokenizer that we ship, as
            ``adapt_debug`` says. What that replaces is said in the log. Else all of it is kept.

    Raises:
        UnadaptableError: Names everything that stands in the way.
    """
    reasons = list(_obstacles(published, is_debug=is_debug))
    if reasons:
        raise UnadaptableError("; ".join(reasons))
    adapted = copy.deepcopy(published)
    assert adapted.model_spec is not None
    model: Any = adapted.model_spec.model
    _read_text_alone(model, adapted.model_spec.name)
    if intended_device_type() != "cpu":
        _attend_with_flex_attention(model, adapted.model_spec.name)
    if not is_debug:
        return _keeping_rules(adapt_published(adapted), type(published))
    debug = adapt_debug(
        dataclasses.replace(adapted, tokenizer=HuggingFaceTokenizer.Config()),
        learning_rate=_learning_rate(published),
        batch_size=_DEBUG_BATCH_SIZE,
    )
    replaced = [
        line
        for name in _CHANGED_IN_DEBUG
        for line in _replaced(name, getattr(published, name), getattr(debug, name))
    ]
    spec = adapted.model_spec
    say_once(f"{spec.name} {spec.flavor} trains on the text at hand, with {'; '.join(replaced)}")
    return debug


def _replaced(name: str, before: object, after: object) -> Iterator[str]:
    """Say what differs, field by field where it is of one kind."""
    if before == after:
        return
    if dataclasses.is_dataclass(before) and isinstance(after, type(before)):
        for field in dataclasses.fields(before):
            values = (getattr(each, field.name) for each in (before, after))
            yield from _replaced(f"{name}.{field.name}", *values)
    elif dataclasses.is_dataclass(before) or dataclasses.is_dataclass(after):
        yield f"{name} {_name(after)} in place of {_name(before)}"
    else:
        yield f"{name} {after!r} in place of {before!r}"


def _keeping_rules(config: GraphTrainer.Config, kind: type[Trainer.Config]) -> GraphTrainer.Config:
    """The same configuration, judged by what the published class asks of it too, as it changes."""
    if kind is Trainer.Config:
        return config
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return _with_rules(kind)(**values)  # type: ignore[arg-type]  # mypy asks its instances for a hash


@functools.cache
def _with_rules(kind: type[Trainer.Config]) -> type[GraphTrainer.Config]:
    def judge(self: Any) -> None:
        GraphTrainer.Config.__post_init__(self)
        kind.__post_init__(self)

    base = GraphTrainer.Config
    names = {"__slots__": (), "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), {**names, "__post_init__": judge})


def _obstacles(published: Trainer.Config, *, is_debug: bool) -> Iterator[str]:
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
    windows = _windows(model)
    if windows:
        yield (
            f"its VarlenAttention has window_size {', '.join(map(str, windows))}, and neither "
            "FlexAttention nor attention on cpu, which would replace it, has a window: let "
            "get_attention_masks of the model make a mask of it"
        )
    has_images = any(getattr(model, name, None) is not None for name in _ENCODERS)
    if has_images and not is_debug and not isinstance(published.dataloader, _TEXT):
        yield (
            f"its data are images ({_name(published.dataloader)}), of which every batch has "
            "another number where a graph has fixed shapes"
        )
    needed = [name for name in _ENCODERS if has_images and not _may_be_none(model, name)]
    if needed:
        yield f"{_name(model)} cannot be built without {', '.join(needed)}, and is given text alone"


def _windows(model: Decoder.Config) -> list[tuple[int, int]]:
    """Windows of attention that no mask would have: what replaces VarlenAttention has none."""
    if makes_own_masks(model):
        return []
    windowed = (each for _, each, _, _ in model.traverse(VarlenAttention.Config))
    found = (cast("VarlenAttention.Config", each).window_size for each in windowed)
    return sorted({(left, right) for left, right in found} - {_NO_WINDOW})


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
