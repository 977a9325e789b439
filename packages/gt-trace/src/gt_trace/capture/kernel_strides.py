"""Fake tensors with the strides that kernels give.

PyTorch's fake kernels of some operators report other strides than the kernels where an operand is
not contiguous: ``mse_loss_backward`` and ``softplus_backward`` of a transposed tensor, for example.
Python decides by strides between a view and a copy, so that a graph would hold a ``view`` where
eager copies. Here such an operator runs once on small real tensors that lie in the same order in
memory, and its fake results get the order of the real ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from gt_trace._torch_internals import (
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    ShapeEnv,
    is_functional,
    no_dispatch,
    pytree,
)

_ANY_SIZES = frozenset(
    {
        "aten::_prelu_kernel",
        "aten::_prelu_kernel_backward",
        "aten::binary_cross_entropy",
        "aten::binary_cross_entropy_backward",
        "aten::elu",
        "aten::elu_backward",
        "aten::glu",
        "aten::glu_backward",
        "aten::hardshrink_backward",
        "aten::hardsigmoid",
        "aten::hardsigmoid_backward",
        "aten::hardswish",
        "aten::hardswish_backward",
        "aten::hardtanh",
        "aten::hardtanh_backward",
        "aten::huber_loss",
        "aten::huber_loss_backward",
        "aten::leaky_relu",
        "aten::leaky_relu_backward",
        "aten::log_sigmoid_backward",
        "aten::log_sigmoid_forward",
        "aten::mish_backward",
        "aten::mse_loss",
        "aten::mse_loss_backward",
        "aten::native_dropout_backward",
        "aten::rrelu_with_noise_backward",
        "aten::smooth_l1_loss",
        "aten::smooth_l1_loss_backward",
        "aten::soft_margin_loss",
        "aten::soft_margin_loss_backward",
        "aten::softplus",
        "aten::softplus_backward",
        "aten::softshrink",
        "aten::softshrink_backward",
        "aten::_batch_norm_with_update_functional",
        "aten::_log_softmax",
        "aten::_log_softmax_backward_data",
        "aten::_native_batch_norm_legit",
        "aten::_native_batch_norm_legit_functional",
        "aten::_softmax",
        "aten::_softmax_backward_data",
        "aten::batch_norm_backward",
        "aten::cumsum",
        "aten::cumprod",
        "aten::logcumsumexp",
        "aten::native_batch_norm",
        "aten::native_batch_norm_backward",
        "aten::native_layer_norm",
        "aten::native_layer_norm_backward",
    }
)
"""Operators without the tag of elementwise ones that take any sizes, if equal sizes stay equal. The
fake kernels of some report other strides on PyTorch's samples; the others are their relatives."""

_GIVEN_SIZES = frozenset(
    {
        "aten::_fft_c2c",
        "aten::_fft_c2r",
        "aten::_fft_r2c",
        "aten::channel_shuffle",
        "aten::reflection_pad1d",
        "aten::reflection_pad1d_backward",
        "aten::reflection_pad2d",
        "aten::reflection_pad2d_backward",
        "aten::reflection_pad3d",
        "aten::reflection_pad3d_backward",
        "aten::replication_pad1d",
        "aten::replication_pad1d_backward",
        "aten::replication_pad2d",
        "aten::replication_pad2d_backward",
        "aten::replication_pad3d",
        "aten::replication_pad3d_backward",
    }
)
"""Operators with other strides whose sizes depend on numbers among their arguments."""

_MOST_ELEMENTS = 1 << 22
"""Largest operand of an operator that runs on sizes as they are."""


class _Layout(NamedTuple):
    """How an operand lies in memory; sizes are numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_Order: TypeAlias = tuple[int, ...]
"""The dims of a tensor from the outermost in memory to the innermost."""

_KNOWN: dict[Any, tuple[_Order | None, ...]] = {}
"""The order in which each result lies, by the operator and by how its operands lie."""


def new_fake_mode() -> FakeTensorMode:
    """Return a mode for a capture: with symbolic sizes, and with the strides of kernels."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    fake_dispatch = mode.dispatch

    def dispatch(
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        given = kwargs or {}
        result = fake_dispatch(func, types, args, given)
        if not _is_tried(func):
            return result
        # Operators that are tried take tensors as they are, in no lists.
        tensors = [each for each in (*args, *given.values()) if isinstance(each, torch.Tensor)]
        if all(map(_is_contiguous, tensors)):
            return result  # then fake kernels agree with real ones
        return _with_kernel_strides(mode, func, args, given, tensors, result)

    # Not a subclass: higher-order operators have rules for this very class.
    mode.dispatch = dispatch  # type: ignore[method-assign]
    return mode


def _with_kernel_strides(
    mode: FakeTensorMode,
    func: OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    tensors: Sequence[torch.Tensor],
    result: Any,
) -> Any:
    results, spec = pytree.tree_flatten(result)
    if not all(_is_plain(each) for each in (*tensors, *results)):
        return result
    orders = _result_orders(func, args, kwargs, tensors, len(results))
    changed = [
        _laid_out(mode, each, order) if isinstance(each, torch.Tensor) else each
        for each, order in zip(results, orders, strict=True)
    ]
    return pytree.tree_unflatten(changed, spec)


def _laid_out(mode: FakeTensorMode, result: torch.Tensor, order: _Order | None) -> torch.Tensor:
    if order is None or len(order) != result.dim():
        return result
    strides: list[Any] = [1] * len(order)
    step: Any = 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * result.shape[dim]
    # As numbers: a comparison of symbols would become an assumption of the graph.
    sizes, was, now = map(_numbers, (result.shape, result.stride(), strides))
    if sizes is None or was is None or now is None:
        return result
    if all(size < 2 or old == new for size, old, new in zip(sizes, was, now, strict=True)):
        return result
    with mode:
        return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)


_TRIED: dict[Any, bool] = {}


def _is_tried(func: Any) -> bool:
    known = _TRIED.get(func)
    if known is None:
        known = _TRIED[func] = _may_be_tried(func)
    return known


def _may_be_tried(func: Any) -> bool:
    """Whether the fake kernel of an operator is not trusted.

    Kernels may read memory that is not theirs if sizes do not fit, so that none runs but those
    known to be safe.
    """
    if not is_functional(func) or func.namespace != "aten" or func.is_view:
        return False
    return _takes_any_sizes(func) or func._schema.name in _GIVEN_SIZES


def _takes_any_sizes(func: OpOverload) -> bool:
    return torch.Tag.pointwise in func.tags or func._schema.name in _ANY_SIZES


def _is_plain(value: object) -> bool:
    """Whether a value is no tensor, or a strided fake tensor on a device that is here."""
    if not isinstance(value, torch.Tensor):
        return True
    if type(value) is not FakeTensor or value.layout is not torch.strided:
        return False
    kind = value.device.type
    return kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())


def _result_orders(
    func: OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    tensors: Sequence[torch.Tensor],
    num_results: int,
) -> tuple[_Order | None, ...]:
    unknown = (None,) * num_results
    layouts: list[_Layout] = []
    for each in tensors:
        shape, stride = _numbers(each.shape), _numbers(each.stride())
        if shape is None or stride is None:
            return unknown
        layouts.append(_Layout(shape, stride, each.dtype, each.device))
    leaves = pytree.tree_leaves((args, kwargs))
    rest = ["tensor" if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    key = (func, *layouts, repr(rest), torch.get_default_dtype())
    orders = _KNOWN.get(key)
    if orders is None:
        orders = _measured(func, args, kwargs, layouts) or unknown
        _KNOWN[key] = orders
    return orders


def _is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether a tensor is contiguous, for the hints of its symbols; one without hints counts so."""
    if all(type(each) is int for each in (*tensor.shape, *tensor.stride())):
        return tensor.is_contiguous()
    shape, stride = _numbers(tensor.shape), _numbers(tensor.stride())
    if shape is None or stride is None:
        return True
    step = 1
    for size, own in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and own != step:
            return False
        step *= size
    return True


def _numbers(sizes: Sequence[Any]) -> tuple[int, ...] | None:
    """Return sizes as numbers, symbols by their hints; None where one has none."""
    found = [each if type(each) is int else _hint(each) for each in sizes]
    return None if None in found else tuple(found)


def _hint(size: torch.SymInt) -> Any:
    return getattr(size.node, "hint", None)


def _measured(
    func: OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    layouts: Sequence[_Layout],
) -> tuple[_Order | None, ...] | None:
    """Return how the results of the kernel lie; None if it takes no operands of that kind."""
    sizes = sorted({size for each in layouts for size in each.shape if size > 1})
    used = {0: 0, 1: 1, **{size: size for size in sizes}}
    if _takes_any_sizes(func) and not any(map(_shares_elements, layouts)):
        used |= {size: rank + 2 for rank, size in enumerate(sizes)}
    elif any(math.prod(each.shape) > _MOST_ELEMENTS for each in layouts):
        return None
    results = _run(func, args, kwargs, layouts, used)
    if results is None:
        return None
    return tuple(
        order_in_memory(each) if isinstance(each, torch.Tensor) else None for each in results
    )


def _run(
    func: OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    layouts: Sequence[_Layout],
    sizes: Mapping[int, int],
) -> list[Any] | None:
    remaining = iter(layouts)

    def real(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _real(next(remaining), sizes)
        if isinstance(leaf, torch.SymInt):
            return sizes.get(_hint(leaf), 1)
        return leaf

    with no_dispatch(), DisableTorchFunction(), torch.no_grad():
        given, named = pytree.tree_map(real, (tuple(args), dict(kwargs)))
        names = [each.name for each in func._schema.arguments]
        if "normalized_shape" in names:
            index = names.index("normalized_shape")
            given = (
                *given[:index],
                [sizes.get(each, each) for each in given[index]],
                *given[index + 1 :],
            )
        try:
            return pytree.tree_leaves(func(*given, **named))
        except Exception:  # noqa: BLE001 - fake kernels take what real ones may refuse
            return None


def _shares_elements(layout: _Layout) -> bool:
    """Return whether elements share memory other than by a stride of 0, as those of windows do."""
    extent = 1
    for step, size in sorted(zip(layout.stride, layout.shape, strict=True)):
        if step and size > 1:
            if step < extent:
                return True
            extent += step * (size - 1)
    return False


def _real(layout: _Layout, sizes: Mapping[int, int]) -> torch.Tensor:
    """Return a tensor of other sizes whose dims lie in the same order, dense where it was.

    If elements share memory, sizes are the same, and strides are too.
    """
    shape, stride, dtype, device = layout
    if _shares_elements(layout):
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        return torch.ones(extent, dtype=dtype, device=device).as_strided(shape, stride)
    new_shape = [sizes[size] for size in shape]
    new_stride = [0] * len(shape)
    step = new_step = 1
    for dim in sorted(range(len(shape)), key=lambda dim: (stride[dim], -dim)):
        if stride[dim] == 0:
            continue
        if stride[dim] > step:  # a gap, as in a slice
            new_step *= 2
        new_stride[dim] = new_step
        step = max(step, stride[dim] * shape[dim])
        new_step = max(new_step, new_stride[dim] * new_shape[dim])
    extent = 1 + sum(
        (size - 1) * step for size, step in zip(new_shape, new_stride, strict=True) if size
    )
    ones = torch.ones(extent, dtype=dtype, device=device)
    return ones.as_strided(new_shape, new_stride)


def order_in_memory(tensor: torch.Tensor) -> _Order | None:
    """Return a tensor's dims from the outermost in memory on; None for a tensor with gaps.

    Symbols count by their hints; a tensor with symbols that have none has no order.
    """
    shape, stride = _numbers(tensor.shape), _numbers(tensor.stride())
    if shape is None or stride is None:
        return None
    by_stride = [(-step, dim) for dim, step in enumerate(stride)]
    order = tuple(dim for _, dim in sorted(by_stride))
    step = 1
    for dim in reversed(order):
        if shape[dim] > 1 and stride[dim] != step:
            return None
        step *= shape[dim]
    return order
