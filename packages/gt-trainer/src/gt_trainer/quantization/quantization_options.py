"""The ``--quantization.*`` options of ``gt-train``: which products of a model are in 8 bits.

Plain data, so that a configuration can be made, shown and changed where torchao is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LinearPrecision = Literal[
    "none", "float8_tensorwise", "float8_rowwise", "float8_rowwise_with_gw_hp", "mxfp8"
]
"""How linear layers multiply; "none" is in the run's own precision."""

ExpertPrecision = Literal["none", "float8_rowwise", "mxfp8"]
"""How the grouped products of experts are computed; "none" is in the run's own precision."""


@dataclass(kw_only=True, slots=True)
class QuantizationConfig:
    """Which products are computed in 8 bits, forward and backward. Needs gt-trainer[float8]."""

    linears: LinearPrecision = "none"
    """Precision of linear layers.
    float8_tensorwise: one scale for each tensor.
    float8_rowwise: one for each row, a power of two.
    float8_rowwise_with_gw_hp: likewise, but gradients of weights in the run's precision.
    mxfp8: one for each 32 elements.
    Layers whose extents are no multiple of 16 (mxfp8: 32) stay in the run's precision."""

    experts: ExpertPrecision = "none"
    """Precision of the grouped products of experts.
    float8_rowwise: one scale for each row, a power of two.
    mxfp8: one for each 32 elements."""

    only: tuple[str, ...] = ()
    """Linear layers to quantize, by parts of their names, as attention.
    Empty: all that skip does not name."""

    skip: tuple[str, ...] = ()
    """Linear layers to leave in the run's precision, by parts of their names, as lm_head."""

    emulate: bool = False
    """Round as the device's 8-bit products would, and multiply in the run's precision.
    For devices without such products, as CPUs; slower than not to quantize."""

    def __bool__(self) -> bool:
        """Whether anything is to be quantized."""
        return self.linears != "none" or self.experts != "none"
