"""What is used of torchao, which is an extra of this package, and no public name of its own.

All of it stands here, so that a new torchao costs one edit. It is imported where it is needed.
"""

from __future__ import annotations

from torchao.float8 import Float8LinearConfig

# How scales are taken and applied: what emulated grouped products of float8 are made of.
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import amax_to_scale, tensor_to_scale, to_fp8_saturated

# The public way there is a subclass of tensors, whose operators a trace does not see.
from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm

# All of a layer's forward but its bias; the layer itself reads its weight as a whole.
from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

to_mxfp8_then_scaled_grouped_mm = _to_mxfp8_then_scaled_grouped_mm
to_mxfp8_then_scaled_mm = _to_mxfp8_then_scaled_mm

__all__ = [
    "Float8LinearConfig",
    "KernelPreference",
    "ScalingGranularity",
    "amax_to_scale",
    "tensor_to_scale",
    "to_fp8_saturated",
    "to_mxfp8_then_scaled_grouped_mm",
    "to_mxfp8_then_scaled_mm",
]
