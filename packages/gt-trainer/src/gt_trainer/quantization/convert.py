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
from dataclasses import dataclass
from typing import cast

import torch._inductor.config
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torchtitan.components.quantization import (
    Float8GroupedExpertsConverter,
    Float8Linear,
    MXFP8GroupedExpertsConverter,
    MXFP8Linear,
)
from torchtitan.config.override import derive
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.model import BaseModel

from gt_trainer.quantization._torchao_internals import (
    Float8LinearConfig,
    KernelPreference,
    to_mxfp8_then_scaled_mm,
)
from gt_trainer.quantization.emulated_experts import EmulatedFloat8Experts, EmulatedMXFP8Experts
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


# A linear layer in MXFP8 that multiplies what its rank has.
#
# torchao's layer quantizes DTensors as a whole. Where the dim that is summed over is sharded,
# its emulation gathers it, and the layer's result is then not the partial sum that torchtitan's
# tensor-parallel plan is written for. Blocks of 32 elements never span ranks whose parts are
# multiples of 32: each rank quantizes its own, and the bits are the same. torchtitan's NVFP4
# layer does so too (``torchtitan/components/quantization/nvfp4.py``).
_BLOCK = 32


class LocalMXFP8Linear(MXFP8Linear):
    """torchtitan's, on the local part of input and weight; emulated where a device needs that."""

    @dataclass(kw_only=True, slots=True)
    class Config(MXFP8Linear.Config):
        """That of torchtitan's layer, and whether to emulate its products."""

        emulate: bool = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.emulate:
            self.kernel_preference = KernelPreference.EMULATED

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torchtitan shards it by that name
        """Multiply by the weight.

        Args:
            input: (..., in_features), plain or a DTensor.

        Returns:
            (..., out_features); of a DTensor one that is sharded by the weight's outputs, or
            partial where the weight's inputs are sharded.

        Raises:
            ValueError: a rank's part of a dim that is summed over is no multiple of 32.
        """
        weight, bias = cast("Tensor", self.weight), cast("Tensor | None", self.bias)
        if isinstance(weight, DTensor):
            output = self._multiply_locally(input, weight)
        else:
            output = self._multiply(input, weight)
        return output if bias is None else output + bias.to(output.dtype)

    def _multiply_locally(self, x: Tensor, weight: DTensor) -> Tensor:
        assert isinstance(x, DTensor)
        sides = [
            _sides(of_input, of_weight, dim=x.ndim - 1)
            for of_input, of_weight in zip(x.placements, weight.placements, strict=True)
        ]
        local_x = x.to_local(grad_placements=[each.grad_input for each in sides])
        local_weight = weight.to_local(grad_placements=[each.grad_weight for each in sides])
        if odd := [str(extent) for extent in local_weight.shape if extent % _BLOCK]:
            raise ValueError(
                f"a rank has {tuple(local_weight.shape)} of a weight, and {' and '.join(odd)} is "
                f"no multiple of {_BLOCK}, which MXFP8 gives one scale: use a smaller "
                "--parallelism.tensor_parallel_degree, or name the layer in --quantization.skip"
            )
        output: Tensor = DTensor.from_local(
            self._multiply(local_x, local_weight),
            weight.device_mesh,
            [each.output for each in sides],
        )
        return output

    def _multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        product: Tensor = to_mxfp8_then_scaled_mm(
            x,
            weight,
            kernel_preference=self.kernel_preference,
            scale_calculation_mode=self.scale_calculation_mode,
            wgrad_with_hp=self.wgrad_with_hp,
        )
        return product


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sides:
    """How the tensors of a product lie along one mesh axis."""

    output: Placement
    grad_input: Placement
    grad_weight: Placement


def _sides(of_input: Placement, of_weight: Placement, *, dim: int) -> _Sides:
    """Those of input (..., K) and weight (N, K).

    Args:
        of_input: its placement.
        of_weight: likewise.
        dim: the last of the input.
    """
    match of_input, of_weight:
        case Replicate(), Shard(dim=0):
            return _Sides(output=Shard(dim), grad_input=Partial(), grad_weight=of_weight)
        case Shard(dim=sharded), Shard(dim=1) if sharded == dim:
            return _Sides(output=Partial(), grad_input=of_input, grad_weight=of_weight)
        case Shard(dim=sharded), Replicate() if sharded != dim:
            return _Sides(output=of_input, grad_input=of_input, grad_weight=Partial())
        case Replicate(), Replicate():
            return _Sides(output=of_input, grad_input=of_input, grad_weight=of_weight)
    raise ValueError(
        f"MXFP8 has no local product of an input that is {of_input} and a weight that is "
        f"{of_weight}"
    )
