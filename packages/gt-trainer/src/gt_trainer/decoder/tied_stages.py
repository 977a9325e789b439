"""Let torchtitan's decoders with a tied weight be cut into stages, its refusal and adapter aside.

torchtitan 0.3.0 refuses a decoder whose embedding and output projection are one weight as soon as
there is a pipeline (``Decoder.Config.update_from_config``): its stages would train two. Ours sum
both gradients (``gt_trainer.pipelines.tied_weight``), so the model's configuration is told of a run
without a pipeline, which is all that it uses the degree for.

Its state dict adapters take the weight from the embedding, which in Hugging Face's files is the
only one, and so find none on a rank that holds the projection alone, or neither.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import fields, replace
from typing import Any

import torch
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

EMBEDDING = "tok_embeddings.weight"
"""The name under which the whole model's optimizer has the tied weight, and its checkpoints."""

PROJECTION = "lm_head.weight"
"""Its other name, under which it is drawn."""

_PUBLISHED_EMBEDDING = "model.embed_tokens.weight"


def allow_tied_stages(model: Decoder.Config) -> Decoder.Config:
    """Return a configuration like ``model``, of the same model, that accepts a pipeline.

    Layers and other parts are shared with ``model``. The class has the name of torchtitan's, and
    is one of its own.
    """
    values = {each.name: getattr(model, each.name) for each in fields(model) if each.init}
    return _allowing(type(model))(**values)  # type: ignore[arg-type]  # mypy asks its instances for a hash


def adapter_of_stages(adapter: type[BaseStateDictAdapter]) -> type[BaseStateDictAdapter]:
    """Return ``adapter`` for state dicts of stages too, whichever of both names they have.

    Files hold what they held before: the weight once, as the embedding.
    """

    class AdapterOfStages(adapter):  # type: ignore[valid-type,misc]  # a class that is an argument
        """torchtitan's, given the tied weight under the name that it looks for."""

        def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
            super().__init__(model_config, hf_assets_path)
            if self.fqn_to_index_mapping:
                # torchtitan's does so where it meets the projection: on one stage of several.
                self.fqn_to_index_mapping.pop(PROJECTION, None)

        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            renamed = {name: each for name, each in state_dict.items() if name != PROJECTION}
            if PROJECTION in state_dict:
                renamed.setdefault(EMBEDDING, state_dict[PROJECTION])
            converted: dict[str, Any] = super().to_hf(renamed)
            return converted

        def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
            given = dict(hf_state_dict)
            # torchtitan's adds the projection itself, and stops where there is no embedding.
            given.setdefault(PROJECTION, given.get(_PUBLISHED_EMBEDDING, torch.empty(0)))
            converted: dict[str, Any] = super().from_hf(given)
            if _PUBLISHED_EMBEDDING not in given:
                converted.pop(PROJECTION, None)
            return converted

    return AdapterOfStages


@functools.cache
def _allowing(kind: type[Decoder.Config]) -> type[Decoder.Config]:
    def update_from_config(self: Any, *, config: Any, **kwargs: Any) -> None:
        kind.update_from_config(self, config=_without_pipeline(config), **kwargs)

    names = {"__slots__": (), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**names, "update_from_config": update_from_config})


def _without_pipeline(config: Any) -> Any:
    alike = copy.copy(config)
    alike.parallelism = replace(config.parallelism, pipeline_parallel_degree=1)
    return alike
