"""The matrix products of a model that may be in 8 bits, which are, and why others are not.

Read off the model's configuration: before it is quantized, by what the ``--quantization.*`` options
ask for and by what an 8-bit product needs; afterwards, or where torchtitan's converters have
quantized it, by the layers that it has. Of a model that is not quantized, torchao is not needed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from torchtitan.components.quantization import Float8Linear, MXFP8Linear, NVFP4Linear
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.model import BaseModel

from gt_trainer.quantization.quantization_options import LinearPrecision, QuantizationConfig

ProductKind = Literal["linear", "experts"]

FLOAT8_PREFIX = "float8_"
"""Of the precisions that are torchao's recipes for float8."""

MULTIPLES: Mapping[str, int] = MappingProxyType({"float8": 16, "mxfp8": 32})
"""What extents of a product must be multiples of, by the first part of the precision's name."""

_EXPERTS = ("Float8", "MXFP8", "EmulatedFloat8", "EmulatedMXFP8")
_MAX_TOLD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixProduct:
    """A linear layer, or the experts of one mixture."""

    name: str
    """Fully qualified name of the module."""

    kind: ProductKind

    precision: str | None
    """As the options name it; None for the run's own."""

    why_not: str | None
    """Why it is in the run's own precision; None if it is not."""


def products_of(model: BaseModel.Config, options: QuantizationConfig) -> Iterator[MatrixProduct]:
    """Yield every linear layer of a model, then the experts of every mixture.

    Args:
        model: of the run, quantized or not.
        options: of the run.
    """
    for name, linear, _, _ in model.traverse(Linear.Config):
        assert isinstance(linear, Linear.Config)
        precision = _precision_of_linear(linear)
        why_not = None if precision else _why_not_linear(name, linear, options)
        yield MatrixProduct(
            name=name,
            kind="linear",
            precision=precision or (options.linears if why_not is None else None),
            why_not=why_not,
        )
    for name, experts, _, _ in model.traverse(GroupedExperts.Config):
        assert isinstance(experts, GroupedExperts.Config)
        precision = _precision_of_experts(experts)
        why_not = None if precision else _why_not_experts(experts, options)
        yield MatrixProduct(
            name=name,
            kind="experts",
            precision=precision or (options.experts if why_not is None else None),
            why_not=why_not,
        )


def names_in_short(names: Iterable[str], *, most: int | None = _MAX_TOLD) -> str:
    """Name modules, with the layers of like ones as a range: ``layers.0-3,7.attention.wo``.

    Args:
        names: fully qualified.
        most: after so many, the number of the others stands for them; None names all.
    """
    layers: dict[tuple[str, str], list[int]] = {}
    for name in names:
        parts = re.fullmatch(r"(.*?layers)\.(\d+)\.(.*)", name)
        key, layer = ((parts[1], parts[3]), int(parts[2])) if parts else ((name, ""), -1)
        layers.setdefault(key, []).append(layer)
    told = [
        f"{head}.{_ranges(numbers)}.{tail}" if tail else head
        for (head, tail), numbers in layers.items()
    ]
    if most is not None and len(told) > most:
        told = [*told[:most], f"and {len(told) - most} more"]
    return ", ".join(told)


def _ranges(numbers: list[int]) -> str:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def _precision_of_linear(linear: Linear.Config) -> str | None:
    layers: dict[str, Any] = {"mxfp8": MXFP8Linear, "nvfp4": NVFP4Linear}
    for precision, layer in layers.items():
        if layer is not None and isinstance(linear, layer.Config):
            return precision
    if Float8Linear is None or not isinstance(linear, Float8Linear.Config):
        return None
    # Imported here: who has such a layer has torchao.
    from gt_trainer.quantization._torchao_internals import Float8LinearConfig

    config: Any = linear._torchao_config
    for precision in get_args(LinearPrecision):
        if precision.startswith(FLOAT8_PREFIX):
            recipe = Float8LinearConfig.from_recipe_name(precision.removeprefix(FLOAT8_PREFIX))
            if dataclasses.replace(config, emulate=False) == recipe:
                return str(precision)
    return "float8 by a recipe of its own"


def _precision_of_experts(experts: GroupedExperts.Config) -> str | None:
    # torchtitan makes the class for each kind of experts, and has no public name for any.
    name = type(experts).__qualname__.rpartition(".")[0].rpartition(".")[2]
    if not name.startswith(_EXPERTS):
        owner = getattr(type(experts), "_owner", None)
        name = owner.__name__ if owner is not None else name
    if not name.startswith(_EXPERTS):
        return None
    return "mxfp8" if "MXFP8" in name else "float8_rowwise"


def _why_not_linear(name: str, linear: Linear.Config, options: QuantizationConfig) -> str | None:
    if options.linears == "none":
        return "--quantization.linears is none"
    for part in options.skip:
        if part in name:
            return f"--quantization.skip names {part!r}"
    if options.only and not any(part in name for part in options.only):
        return "--quantization.only does not name it"
    return _why_not_extents((linear.in_features, linear.out_features), options.linears)


def _why_not_experts(experts: GroupedExperts.Config, options: QuantizationConfig) -> str | None:
    if options.experts == "none":
        return "--quantization.experts is none"
    return _why_not_extents((experts.dim, experts.hidden_dim), options.experts)


def _why_not_extents(extents: tuple[int, int], precision: str) -> str | None:
    multiple = MULTIPLES[precision.partition("_")[0]]
    odd = [str(extent) for extent in extents if extent % multiple]
    if not odd:
        return None
    return f"{' and '.join(odd)} features: no multiple of {multiple}"
