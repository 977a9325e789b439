"""What the ``--quantization.*`` options make of a model's configuration.

The layers are torchtitan's (``torchtitan/components/quantization``). Its converters ask, when they
are built, for a device that can multiply in 8 bits; but a dry run is of devices that are not here,
and an emulated run needs none, so that layers are put in their place here, and ``preflight`` asks
for the device. Emulated layers keep the recipe that was asked for: torchtitan 0.3.0 emulates
tensor-wise scales, whatever it is.

Needs torchao.
"""

from __future__ import annotations

import copy
import dataclasses

import torch._inductor.config
from torchtitan.components.quantization import (
    Float8GroupedExpertsConverter,
    Float8Linear,
    MXFP8GroupedExpertsConverter,
)
from torchtitan.config.override import derive
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.model import BaseModel

from gt_trainer.quantization._torchao_internals import Float8LinearConfig
from gt_trainer.quantization.emulated_experts import EmulatedFloat8Experts, EmulatedMXFP8Experts
from gt_trainer.quantization.local_linear import LocalMXFP8Linear
from gt_trainer.quantization.products import FLOAT8_PREFIX, products_of
from gt_trainer.quantization.quantization_options import QuantizationConfig


def quantize(model: BaseModel.Config, options: QuantizationConfig) -> BaseModel.Config:
    """Return a model whose selected products are in 8 bits.

    Args:
        model: Not changed. What of it is quantized already, by torchtitan's converters say, stays
            as it is.
        options: which products, and how.
    """
    already = {each.name for each in products_of(model, QuantizationConfig()) if each.precision}
    to_do = [each for each in products_of(model, options) if each.precision is not None]
    selected = {each.name for each in to_do if each.name not in already}
    if not selected:
        return model
    model = copy.deepcopy(model)
    for name, linear, parent, attribute in list(model.traverse(Linear.Config)):
        if name in selected:
            assert isinstance(linear, Linear.Config)
            _put(parent, attribute, _quantized_linear(linear, options))
    if any(each.kind == "experts" and each.name in selected for each in to_do):
        _quantize_experts(model, options)
    return model


def _quantized_linear(linear: Linear.Config, options: QuantizationConfig) -> Linear.Config:
    if options.linears == "mxfp8":
        return derive(linear, LocalMXFP8Linear.Config, emulate=options.emulate)
    recipe = Float8LinearConfig.from_recipe_name(options.linears.removeprefix(FLOAT8_PREFIX))
    if options.linears == "float8_rowwise":
        # As torchtitan does, for https://github.com/pytorch/pytorch/issues/150859.
        torch._inductor.config.emulate_precision_casts = True
    return derive(
        linear,
        Float8Linear.Config,
        _torchao_config=dataclasses.replace(recipe, emulate=options.emulate),
    )


def _quantize_experts(model: BaseModel.Config, options: QuantizationConfig) -> None:
    if options.emulate:
        kind = EmulatedMXFP8Experts if options.experts == "mxfp8" else EmulatedFloat8Experts
        for _, experts, parent, attribute in list(model.traverse(GroupedExperts.Config)):
            _put(parent, attribute, derive(experts, kind.Config))
    elif options.experts == "mxfp8":
        _MXFP8Experts(MXFP8GroupedExpertsConverter.Config()).convert(model)  # type: ignore[no-untyped-call]  # torchtitan leaves it unannotated
    else:
        _Float8Experts(Float8GroupedExpertsConverter.Config()).convert(model)  # type: ignore[no-untyped-call]  # likewise


class _Float8Experts(Float8GroupedExpertsConverter):
    """torchtitan's converter, for a device that may not be here."""

    def __init__(self, config: Float8GroupedExpertsConverter.Config) -> None:
        self.config = config


class _MXFP8Experts(MXFP8GroupedExpertsConverter):
    """torchtitan's converter, for a device that may not be here."""

    def __init__(self, config: MXFP8GroupedExpertsConverter.Config) -> None:
        self.config = config


def _put(parent: object, attribute: str | int | None, value: object) -> None:
    if isinstance(parent, list) and isinstance(attribute, int):
        parent[attribute] = value
    else:
        assert isinstance(attribute, str)
        setattr(parent, attribute, value)
