"""A run's configuration with the model that its ``--quantization.*`` options make.

A configuration keeps its model as published, and its options beside it, until something is built
from it: whether torchao is installed, flags may still change them.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch
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
from torchtitan.protocols.model_spec import ModelSpec

from gt_trainer.decoder.experts import UncastExperts
from gt_trainer.quantization._torchao_internals import (
    Float8LinearConfig,
    KernelPreference,
    ScalingGranularity,
    amax_to_scale,
    tensor_to_scale,
    to_fp8_saturated,
    to_mxfp8_then_scaled_grouped_mm,
    to_mxfp8_then_scaled_mm,
)
from gt_trainer.quantization.products import FLOAT8_PREFIX, names_in_short, products_of
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


# What the ``--quantization.*`` options make of a model's configuration.
#
# The layers are torchtitan's (``torchtitan/components/quantization``). Its converters ask, when
# they are built, for a device that can multiply in 8 bits; but a dry run is of devices that are
# not here, and an emulated run needs none, so that layers are put in their place here, and
# ``preflight`` asks for the device. Emulated layers keep the recipe that was asked for:
# torchtitan 0.3.0 emulates tensor-wise scales, whatever it is.
#
# Needs torchao.
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


# Experts whose grouped products are rounded to 8 bits, by operators that every device has.
#
# Row-wise float8 multiplies by kernels alone in torchao 0.18 (``prototype/moe_training``), so
# that its products are written here, of torchao's scales and casts; MXFP8 has an emulation
# there. Both kernels want the tokens of an expert padded to a multiple. Row-wise scales do not
# see the padding, and blocks of MXFP8 do: they begin anew with each expert.
_FLOAT8 = torch.float8_e4m3fn
_MX_BLOCK = 32


class EmulatedFloat8Experts(UncastExperts):
    """Experts that multiply as ``Float8GroupedExpertsConverter``'s do, on any device."""

    @dataclass(kw_only=True, slots=True)
    class Config(UncastExperts.Config):
        """That of the experts that it stands for."""

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        product: Tensor = _Float8GroupedProduct.apply(A, B_t, offs)
        return product


class EmulatedMXFP8Experts(UncastExperts):
    """Experts that multiply as ``MXFP8GroupedExpertsConverter``'s do, on any device."""

    @dataclass(kw_only=True, slots=True)
    class Config(UncastExperts.Config):
        """That of the experts that it stands for."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """As the base class's, on tokens padded so that each expert's begin a block of 32.

        Args:
            x_RD: (R, D) tokens, those of one expert after those of another.
            num_tokens_per_expert_E: (E,) integers whose sum is R.

        Returns:
            (R, D), of the dtype of ``x_RD``.
        """
        counts_E = num_tokens_per_expert_E
        padded_E = (counts_E + (_MX_BLOCK - 1)) // _MX_BLOCK * _MX_BLOCK
        shift_E = (padded_E.cumsum(0) - padded_E) - (counts_E.cumsum(0) - counts_E)
        row_R = torch.arange(x_RD.shape[0], device=x_RD.device)
        expert_R = _group_of(row_R, counts_E.cumsum(0)).clamp(max=counts_E.shape[0] - 1)
        row_R = row_R + shift_E[expert_R]
        num_blocks = (x_RD.shape[0] + _MX_BLOCK - 1) // _MX_BLOCK + counts_E.shape[0]
        x_PD = x_RD.new_zeros(num_blocks * _MX_BLOCK, x_RD.shape[1]).index_copy(0, row_R, x_RD)
        return super().forward(x_PD, padded_E).index_select(0, row_R)

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        product: Tensor = to_mxfp8_then_scaled_grouped_mm(
            A, B_t, offs, kernel_preference=KernelPreference.EMULATED
        )
        return product.to(A.dtype)


class _Float8GroupedProduct(torch.autograd.Function):
    """A (R, K), rows by group, times B (E, K, N) gives (R, N); operands of each product rounded."""

    @staticmethod
    def forward(ctx: Any, A_RK: Tensor, B_EKN: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(A_RK, B_EKN, ends_E)
        return torch._grouped_mm(_rounded(A_RK, dim=-1), _rounded(B_EKN, dim=-2), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (dC_RN,) = grads
        A_RK, B_EKN, ends_E = ctx.saved_tensors
        B_ENK = _rounded(B_EKN, dim=-1).transpose(-2, -1)
        dA_RK = torch._grouped_mm(_rounded(dC_RN, dim=-1), B_ENK, offs=ends_E)
        group_R = _group_of(torch.arange(A_RK.shape[0], device=A_RK.device), ends_E)
        num_groups = ends_E.shape[0] + 1  # the last of what is in no group
        dB_ENK = torch._grouped_mm(
            _rounded_by_group(dC_RN, group_R, num_groups).t(),
            _rounded_by_group(A_RK, group_R, num_groups),
            offs=ends_E,
        )
        return dA_RK, dB_ENK.transpose(-2, -1), None


def _group_of(row_R: Tensor, ends_E: Tensor) -> Tensor:
    """Index of the first group that ends behind a row; E behind all."""
    return torch.searchsorted(ends_E.to(row_R.dtype), row_R, right=True)


def _rounded(x: Tensor, *, dim: int) -> Tensor:
    """What a float8 operand stands for, with one scale along a dim, in the dtype of ``x``."""
    scale = tensor_to_scale(
        x,
        _FLOAT8,
        scaling_granularity=ScalingGranularity.AXISWISE,
        axiswise_dim=dim,
        round_scales_to_power_of_2=True,
    )
    return _scaled_and_back(x, scale)


def _rounded_by_group(x_RD: Tensor, group_R: Tensor, num_groups: int) -> Tensor:
    """Likewise with one scale for each column of each group of rows."""
    index_RD = group_R.unsqueeze(-1).expand(-1, x_RD.shape[1])
    amax_GD = x_RD.new_zeros(num_groups, x_RD.shape[1]).scatter_reduce(
        0, index_RD, x_RD.abs(), "amax"
    )
    scale_GD = amax_to_scale(amax_GD, _FLOAT8, round_scales_to_power_of_2=True)
    return _scaled_and_back(x_RD, scale_GD.index_select(0, group_R))


def _scaled_and_back(x: Tensor, scale: Tensor) -> Tensor:
    quantized = to_fp8_saturated(x.to(torch.float32) * scale, _FLOAT8)
    rounded: Tensor = (quantized.to(torch.float32) / scale).to(x.dtype)
    return rounded
