"""A run's configuration with the model that its ``--quantization.*`` options make.

A configuration keeps its model as published, and its options beside it, until something is built
from it: whether torchao is installed, flags may still change them.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, TypeVar

from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec

from gt_trainer.quantization.products import names_in_short, products_of
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


# What a run says at its start of each linear layer and each mixture of experts: its precision.
#
# In a line for each kind, precision and reason: which modules, and why they are not in 8 bits.
# No product falls back to another precision unseen.
def precision_lines(
    model: BaseModel.Config, options: QuantizationConfig, *, own_precision: str
) -> tuple[str, ...]:
    """The table, one line an element; nothing of a model in which nothing is quantized.

    Args:
        model: that is trained, quantized.
        options: of the run.
        own_precision: of what is not quantized, as "bfloat16".
    """
    rows: dict[tuple[bool, str], list[str]] = {}
    for product in products_of(model, options):
        what = "experts of mixtures" if product.kind == "experts" else "linear layers"
        how = product.precision or f"{own_precision} ({product.why_not})"
        key = (product.precision is None, f"{what} in {how}")
        rows.setdefault(key, []).append(product.name)
    if all(falls_back for falls_back, _ in rows):
        return ()
    title = "Precision of matrix products"
    return (
        f"{title}, emulated:" if options.emulate else f"{title}:",
        *(
            f"  {what}, {len(names)}: {names_in_short(names, most=None)}"
            for (_, what), names in sorted(rows.items(), key=lambda row: row[0][0])
        ),
    )
