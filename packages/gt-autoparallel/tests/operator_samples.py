"""At least one call of every operator that has a rule: what the rules are proven on.

Sizes are multiples of 4 where they can be, so that two mesh axes of 2 may cut one dim; some are 2,
so that pieces of size 1 occur.
"""

from __future__ import annotations

from typing import Any

import torch
from attention_samples import ATTENTION
from sample_values import (
    bools,
    call,
    close,
    complexes,
    distinct,
    ids,
    ints,
    positive,
)
from simulated_ranks import Sample

_UNARY_EXACT = "abs bitwise_not ceil clone detach alias floor isfinite isinf isnan lift_fresh_copy logical_not neg positive relu round sgn sign trunc"
_UNARY_CLOSE = "angle cos erf exp exp2 expm1 elu gelu hardswish hardtanh leaky_relu mish sigmoid silu sin softplus tan tanh"
_UNARY_POSITIVE = "log log1p log2 reciprocal rsqrt sqrt"
_BINARY_EXACT = "add sub mul maximum minimum eq ge gt le lt ne floor_divide remainder fmod"
_INTEGER = "bitwise_and bitwise_or bitwise_xor"
_LOGICAL = "logical_and logical_or logical_xor"
_OF_GRADIENT = "sigmoid_backward silu_backward tanh_backward gelu_backward"


def _overload(name: str) -> str:
    plain = ("maximum", "minimum", "floor_divide")
    return name if name in plain else f"{name}.Tensor"


def _ends(*rows: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def _floats(*shape: int) -> torch.Tensor:
    return ints(*shape, dtype=torch.float32)


def _integers(*shape: int) -> torch.Tensor:
    return ids(*shape, below=8)


def _rms_norm_backward(
    gradient: Any, x: Any, shape: Any, rstd: Any, weight: Any, wanted: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel exists for CUDA only."""
    scaled = gradient * weight
    normed = x * rstd
    mean = (scaled * normed).mean(-1, keepdim=True)
    return (scaled - normed * mean) * rstd, (gradient * normed).flatten(0, -2).sum(0)


POINTWISE: tuple[Sample, ...] = (
    *(
        call(name, _integers(4, 2) if name == "bitwise_not" else ints(4, 2))
        for name in _UNARY_EXACT.split()
    ),
    *(close(name, ints(4, 2)) for name in _UNARY_CLOSE.split()),
    *(close(name, positive(4, 2)) for name in _UNARY_POSITIVE.split()),
    *(call(_overload(name), ints(4, 4, 2), positive(4, 1)) for name in _BINARY_EXACT.split()),
    *(call(f"{name}.Tensor", _integers(4, 2), _integers(4, 1)) for name in _INTEGER.split()),
    *(call(name, bools(4, 2), bools(2)) for name in _LOGICAL.split()),
    *(close(name, ints(4, 2), ints(4, 2)) for name in _OF_GRADIENT.split()),
    call("_conj", complexes(4, 2)),
    call("_conj_physical", complexes(4, 2)),
    call("real", complexes(4, 2)),
    call("imag", complexes(4, 2)),
    call("bitwise_left_shift.Tensor", _integers(4, 2), _integers(2)),
    call("bitwise_right_shift.Tensor", _integers(4, 2), _integers(2)),
    call("bitwise_and.Tensor", bools(4, 1, 2), bools()),
    call("add.Tensor", ints(4, 4), ints(4, 4), alpha=3),
    call("add.Tensor", ints(4, 4), 2.0),
    call("add.Scalar", ints(4, 4), 2.0),
    call("sub.Tensor", _integers(4, 4), _integers(4, 4)),
    call("rsub.Scalar", ints(4, 4), 2.0),
    call("mul.Tensor", ints(4, 4), ints(4, 4)),
    call("mul.Tensor", ints(4, 4), ints()),
    call("mul.Tensor", ints(1), ints(4, 4)),
    call("mul.Tensor", complexes(4, 2, 4), complexes(1, 2, 1)),
    call("mul.Tensor", ints(4, 4), 3.0),
    call("mul.Scalar", ints(4, 4), 3.0),
    call("mul.Tensor", ints(), ints()),
    call("div.Tensor", ints(4, 4), torch.tensor(2.0, dtype=torch.float64)),
    call("div.Tensor", ints(4, 4), torch.tensor(2)),
    close("div.Tensor", ints(4, 4), positive(4, 4)),
    call("div.Tensor_mode", ints(4, 4), 2.0, rounding_mode="floor"),
    call("div.Scalar", ints(4, 4), 2),
    call("_to_copy", ints(4, 4, dtype=torch.float32), dtype=torch.float64),
    call("_to_copy", ints(4, 4), dtype=torch.float32),
    call("_to_copy", ids(4, 4, below=9), dtype=torch.float64),
    call("_to_copy", bools(4, 4), dtype=torch.float64),
    close("addcdiv", ints(4, 4), ints(4, 4), positive(4)),
    call("addcmul", ints(4, 4), ints(4, 4), ints(4)),
    close("atan2", ints(4, 4), positive(4)),
    call("clamp", ints(4, 4), -1, 2),
    call("clamp.Tensor", ints(4, 4), ints(4), None),
    call("clamp_max", ints(4, 4), 2),
    call("clamp_min", ints(4, 4), 2),
    call("lerp.Scalar", ints(4, 4), ints(4, 4), 0.5),
    call("masked_fill.Scalar", ints(4, 4), bools(4, 1), 0.0),
    call("masked_fill.Tensor", ints(4, 4), bools(4, 1), ints()),
    call("nan_to_num", ints(4, 4)),
    call("pow.Tensor_Scalar", ints(4, 4), 2),
    call("pow.Tensor_Tensor", ints(4, 4), ids(4, below=4)),
    call("pow.Scalar", 2, ids(4, 4, below=4)),
    close("leaky_relu_backward", ints(4, 4), ints(4, 4), 0.5, False),
    close("softplus_backward", ints(4, 4), ints(4, 4), 1.0, 20.0),
    call("threshold_backward", ints(4, 4), ints(4, 4), 0),
    call("where.self", bools(4, 1, 4), ints(), ints(4, 4)),
    call("eq.Tensor", ids(4, 1, 4, 1, below=3), ids(4, 1, 1, 4, below=3)),
    call("copy", ints(4, 4), ints(4, 1)),
    call("fill.Scalar", ints(4, 4), 2.0),
    call("native_dropout_backward", ints(4, 4), bools(4, 4), 2.0),
    call("le.Scalar", ids(4, 4, below=9), 4),
)

CONTRACTIONS = (
    call("mm", ints(4, 8), ints(8, 2)),
    call("bmm", ints(2, 4, 4), ints(2, 4, 8)),
    call("mv", ints(4, 8), ints(8)),
    call("dot", ints(8), ints(8)),
    call("vdot", ints(8), ints(8)),
    call("addmm", ints(2), ints(4, 8), ints(8, 2)),
    call("addmm", ints(4, 1), ints(4, 8), ints(8, 2), beta=2, alpha=3),
    call("addmm", ints(4, 2), ints(4, 8), ints(8, 2)),
    call("_grouped_mm", _floats(8, 16), _floats(2, 16, 16), _ends(3, 8)),
    call("_grouped_mm", _floats(2, 16, 8), _floats(8, 16), _ends(3, 16)),
    call("_grouped_mm", _floats(16, 8), _floats(8, 16), _ends(3, 8)),
    call("_grouped_mm", _floats(2, 8, 8), _floats(2, 8, 8)),
    call("baddbmm", ints(2, 4, 8), ints(2, 4, 4), ints(2, 4, 8), beta=2),
    call("linear", ints(2, 4, 4), ints(8, 4), ints(8)),
    call("linear", ints(2, 4, 4), ints(8, 4)),
    call("matmul", ints(2, 4, 4), ints(4, 8)),
    call("matmul", ints(2, 1, 4, 4), ints(4, 4, 8)),
    call("matmul", ints(2, 4, 4), ints(4)),
    call("matmul", ints(4), ints(4, 4)),
    call("matmul", ints(4), ints(4)),
)

REDUCTIONS = (
    call("histc", ints(4, 4), 3, -4.0, 4.0),
    call("sum", ints(4, 4)),
    call("sum.dim_IntList", ints(4, 4, 2), [0, 1], True),
    call("sum.dim_IntList", ints(4, 4, 2), [-1]),
    call("sum.dim_IntList", ints(4, 4, 2), None, dtype=torch.float32),
    call("sum.dim_IntList", bools(4, 4), [1]),
    call("mean", ints(4, 4)),
    call("mean.dim", ints(4, 4, 8), [2], True),
    call("mean.dim", ints(4, 4, 8), [0, -1], dtype=torch.float32),
    call("all", bools(4, 4)),
    call("all.dim", bools(4, 4), 1),
    call("any.dim", bools(4, 4), 1, True),
    call("any", bools(4, 4)),
    call("amax", ints(4, 4), [1]),
    call("amin", ints(4, 4), [0], True),
    call("argmax", distinct(4, 4), 1),
    call("argmin", distinct(4, 4)),
    call("max.dim", distinct(4, 4), 1),
    call("max", distinct(4, 4)),
    call("min.dim", distinct(4, 4), 0, True),
    call("prod.dim_int", ints(4, 4), 1),
    close("linalg_vector_norm", ints(4, 4), 2, [1]),
    close("logsumexp", ints(4, 4), [1]),
    close("std.correction", ints(4, 4), [1]),
    close("var.correction", ints(4, 4), [1], correction=0),
    close("var_mean.correction", ints(4, 4), [1], correction=0),
)

VIEWS = (
    call("view", ints(4, 4, 8), [16, 8]),
    call("view", ints(16, 4), [4, 4, 4]),
    call("view", ints(4, 4, 8), [4, 4, 2, 2, 2]),
    call("view", ints(6, 4), [4, 6]),
    call("view", ints(4, 2, 1, 4), [4, 1, 8]),
    call("view", ints(4, 4), [-1]),
    call("view", ints(1, 1, 4), [4]),
    call("view", ints(4), [1, 4, 1]),
    call("view", bools(4, 4), [2, 8]),
    call("view.dtype", ints(4, 4), torch.int64),
    call("view.dtype", ints(4, 4), torch.float32),
    call("_unsafe_view", ints(16, 4), [4, 4, 4]),
    call("reshape", ints(4, 4), [16]),
    call("squeeze.dim", ints(4, 1, 2), 1),
    call("squeeze.dim", ints(4, 2, 2), 1),
    call("squeeze.dims", ints(4, 1, 2, 1), [1, 3]),
    call("squeeze", ints(2, 1, 2)),
    call("unsqueeze", ints(4, 2), -1),
    call("permute", ints(2, 4, 4), [2, 0, 1]),
    call("transpose.int", ints(2, 4, 4), -1, 0),
    call("t", ints(2, 4)),
    call("t", ints(4)),
    call("expand", ints(4, 1, 2), [4, 4, -1]),
    call("expand", ints(1, 4), [2, 4, 4]),
    call("expand", ints(), [4]),
    call("repeat", ints(4, 2), [2, 1, 3]),
    call("view_as_complex", ints(4, 4, 2)),
    call("view_as_real", complexes(4, 4)),
)

PIECES = (
    call("cat", [ints(4, 2, 4), ints(4, 1, 4), ints(4, 2, 4)], 1),
    call("cat", [ids(4, 1, below=9), ids(4, 4, below=9)], -1),
    call("split.Tensor", ints(4, 4, 2), 2, 1),
    call("split_with_sizes", ints(4, 4, 2), [1, 3], -2),
    call("slice_scatter", ints(4, 4), ints(4, 2), 1, 1, 3),
    call("slice.Tensor", ints(4, 4), 1, 1, 3),
    call("slice.Tensor", ints(4, 4), 1, 0, 4),
    call("slice.Tensor", ints(4, 4), -1, 0, 9223372036854775807),
    call("slice_backward", ints(4, 2), [4, 4], 1, 1, 3, 1),
    call("slice_backward", ints(4, 4), [4, 4], 0, 0, 9223372036854775807, 1),
    call("select.int", ints(4, 4, 2), 1, -1),
    call("unbind.int", ints(4, 2, 4), 1),
    call("stack", [ints(4, 4), ints(4, 4)], -1),
    call("select_backward", ints(4, 2), [4, 4, 2], 1, 3),
    call("select_scatter", ints(4, 4, 2), ints(4, 2), 1, 3),
    call("constant_pad_nd", ints(4, 4, 4), [0, 2, 1, 0]),
    call("constant_pad_nd", ids(4, 4, below=9), [0, 1], -100),
    call("constant_pad_nd", ints(4, 4), [0, 0, 0, 1], 0.0),
    call("flip", ints(4, 4), [1]),
    call("roll", ints(4, 4), [1], [0]),
    call("roll", ints(4, 4), [1]),
    call("tril", ints(2, 4, 4)),
    call("triu", ints(2, 4, 4), 1),
)

ALONG_DIM = (
    close("_log_softmax", ints(4, 4), 1, False),
    close("_log_softmax_backward_data", ints(4, 4), ints(4, 4), 1, torch.float64),
    close("_softmax", ints(4, 4, 4), -1, False),
    close("_safe_softmax", ints(4, 4, 4), -1),
    close("_softmax_backward_data", ints(4, 4), ints(4, 4), -1, torch.float64),
    call("argsort.stable", distinct(4, 4), stable=True, dim=1),
    call("cummax", distinct(4, 4), 0),
    call("cumprod", ints(4, 4), 0),
    call("cumsum", ints(4, 4), 1),
    call("cumsum", ids(4, below=4), 0, dtype=torch.int32),
    close("glu", ints(4, 4), -1),
    close("glu_backward", ints(4, 2), ints(4, 4), -1),
    call("kthvalue", distinct(4, 4), 2, 1),
    close("logcumsumexp", ints(4, 4), 0),
    call("sort.stable", distinct(4, 4), stable=True),
    call("sort", distinct(4, 4), 0),
    call("topk", distinct(4, 2, 8), 3, -1),
)

_CONVOLUTION = ([1], [1], [1], False, [0], 1)
_TRANSPOSED = ([1], [0], [1], True, [0], 1)
_IN_GROUPS = ([1], [1], [1], False, [0], 2)

CONVOLUTIONS = (
    call("convolution", ints(4, 2, 4), ints(4, 2, 3), ints(4), *_CONVOLUTION),
    call("convolution", ints(4, 2, 4), ints(2, 4, 3), None, *_TRANSPOSED),
    call("convolution", ints(4, 2, 4), ints(4, 1, 3), ints(4), *_IN_GROUPS),
    *(
        call(
            "convolution_backward",
            *(ints(4, 4, 4), ints(4, 2, 4), ints(4, 2, 3), [4], *_CONVOLUTION, wanted),
        )
        for wanted in ([True, True, True], [False, True, False])
    ),
)

NORMALIZATION = (
    close("native_layer_norm", ints(4, 4, 2), [2], ints(2), ints(2), 1e-5),
    close("native_layer_norm", ints(4, 4, 2), [4, 2], None, None, 1e-5),
    close(
        "native_layer_norm_backward",
        *(ints(4, 4, 2), ints(4, 4, 2), [2], ints(4, 4, 1), positive(4, 4, 1)),
        *(ints(2), ints(2), [True, True, True]),
    ),
    close("_fused_rms_norm", ints(4, 4, 2), [2], ints(2), 1e-5),
    close(
        "_fused_rms_norm_backward",
        *(ints(4, 4, 2), ints(4, 4, 2), [2], positive(4, 4, 1), ints(2), [True, True]),
        stand_in=_rms_norm_backward,
    ),
)

EMBEDDING = (
    call("embedding", ints(8, 4), ids(4, 4, below=8)),
    call("embedding", ints(8, 4), ids(4, below=8), 2),
    call("embedding_dense_backward", ints(4, 4, 2), ids(4, 4, below=8), 8, -1, False),
    call("embedding_dense_backward", ints(4, 4, 2), ids(4, 4, below=8), 8, 5, False),
    close("embedding_dense_backward", ints(4, 4, 2), ids(4, 4, below=8), 8, -1, True),
)

INDEXING = (
    call("index.Tensor", ints(8, 4), [ids(4, 2, below=8)]),
    call("index.Tensor", ints(4, 8, 2), [None, ids(4, below=8)]),
    call("index.Tensor", ints(4, 8, 2), [ids(4, 1, below=4), None, ids(1, 4, below=2)]),
    call("index.Tensor", ids(4, 8, below=9), [ids(4, 1, 1, 1, below=4), ids(1, 1, 1, 8, below=8)]),
    call("index.Tensor", ints(4, 4), [torch.tensor([True, False, True, True])]),
    call("_unsafe_index.Tensor", ints(8, 4), [ids(4, below=8)]),
    call("_unsafe_index_put", ints(8, 4), [ids(4, below=8)], ints(4, 4), True),
    call("index_put", ints(8, 4), [ids(4, 2, below=8)], ints(4, 2, 4), True),
    call("index_put", ints(8, 4), [torch.tensor([1, 6])], ints(2, 4)),
    call("index_put", ints(4, 8), [None, ids(4, below=8)], ints(4, 4), True),
    call("index_put", ints(8), [ids(4, 4, below=8)], ints(4), True),
    call("gather", ints(4, 8, 2), 1, ids(4, 4, 2, below=8)),
    call("gather", complexes(4, 8, 2), 1, ids(2, 4, 2, below=8)),
    call("scatter.value", ints(4, 8), -1, torch.tensor([[1, 3]] * 4), 9.0),
    call("scatter.src", ints(4, 8), 1, torch.tensor([[1, 3]] * 4), ints(4, 2)),
    call("scatter_add", ints(4, 8), 1, ids(4, 4, below=8), ints(4, 4)),
    call("scatter_add", ints(8), 0, ids(4, below=8), ints(4)),
    call("index_select", ints(4, 8), 1, ids(4, below=8)),
    call("index_add", ints(4, 8), 1, ids(4, below=8), ints(4, 4)),
)

LOSS = (
    *(
        close("nll_loss_forward", ints(4, 8), ids(4, below=8), weight, reduction, 3)
        for weight in (None, positive(8))
        for reduction in (0, 1, 2)
    ),
    *(
        close(
            "nll_loss_backward",
            *(ints(4) if reduction == 0 else ints(), ints(4, 8), ids(4, below=8), weight),
            *(reduction, 3, positive().reshape(())),
        )
        for weight in (None, positive(8))
        for reduction in (0, 1, 2)
    ),
    call("nll_loss_forward", ints(8), torch.tensor(3), None, 1, -100),
    call(
        "nll_loss_backward", ints(), ints(8), torch.tensor(3), None, 1, -100, positive().reshape(())
    ),
    *(call("mse_loss", ints(4, 4), ints(4, 1), reduction) for reduction in (0, 1, 2)),
    *(
        call(
            "mse_loss_backward",
            *(ints(4, 4) if reduction == 0 else ints(), ints(4, 4), ints(4, 4), reduction),
        )
        for reduction in (0, 1, 2)
    ),
    call("_assert_async", torch.tensor(True)),
    call("_assert_async.msg", torch.tensor(True), "what was promised"),
)

PRODUCERS = (
    call("zeros", [4, 2], dtype=torch.float64),
    call("ones", [4, 2]),
    call("full", [4, 2], 3.0),
    call("empty.memory_format", [4, 2], compared=()),
    call("new_zeros", ints(4, 2), [4, 4]),
    call("new_ones", ints(4, 2), []),
    call("new_full", ints(4, 2), [4, 4], 3.0),
    call("new_empty", ints(4, 2), [4, 4], compared=()),
    call("zeros_like", ints(4, 2), dtype=torch.bool),
    call("zeros_like", ints(4, 2)),
    call("ones_like", ints()),
    call("full_like", ints(4, 2), 3.0),
    call("empty_like", ints(4, 2), compared=()),
    call("arange", 8),
    call("arange.start", 2, 8),
    call("arange.start_step", 2, 8, 2),
    call("eye", 4),
    call("linspace", 0, 1, 4),
    call("linspace.Tensor_Tensor", ints(), ints(), 4),
    call("scalar_tensor", 2.0),
)

SAMPLES: tuple[Sample, ...] = (
    *POINTWISE,
    *CONTRACTIONS,
    *REDUCTIONS,
    *VIEWS,
    *PIECES,
    *ALONG_DIM,
    *CONVOLUTIONS,
    *NORMALIZATION,
    *EMBEDDING,
    *INDEXING,
    *ATTENTION,
    *LOSS,
    *PRODUCERS,
)
