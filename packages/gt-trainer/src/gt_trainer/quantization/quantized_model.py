"""A run's configuration with the model that its ``--quantization.*`` options make.

A configuration keeps its model as published, and its options beside it, until something is built
from it: whether torchao is installed, flags may still change them.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, TypeVar

from torchtitan.protocols.model_spec import ModelSpec

from gt_trainer.quantization.quantization_options import QuantizationConfig


class QuantizableConfig(Protocol):
    """What is read of a trainer's configuration."""

    model_spec: ModelSpec | None
    quantization: QuantizationConfig


ConfigT = TypeVar("ConfigT", bound=QuantizableConfig)


def with_quantized_model(config: ConfigT) -> ConfigT:
    """Return a configuration whose model is quantized as its options say; itself if it is already.

    Args:
        config: Not changed. ``preflight`` has accepted it.
    """
    if not config.quantization or config.model_spec is None:
        return config
    # Imported here: it needs torchao.
    from gt_trainer.quantization.convert import quantize

    model = quantize(config.model_spec.model, config.quantization)
    return dataclasses.replace(  # type: ignore[type-var]  # a dataclass, which no protocol can say
        config, model_spec=dataclasses.replace(config.model_spec, model=model)
    )
