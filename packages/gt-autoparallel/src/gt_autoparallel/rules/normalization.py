"""Layer and RMS norms over trailing dims: every leading dim may be sharded.

The gradients of weight and bias are sums over the leading dims.
"""

from __future__ import annotations

from typing import Any

import torch

from gt_autoparallel.graph.placement_graph import TensorSpec
from gt_autoparallel.rules.dim_labels import DimLabels, Labels
from gt_autoparallel.rules.operator_call import OperatorCall
from gt_autoparallel.rules.operator_rule import Rules, labelled, rules_of
from gt_autoparallel.rules.sharded_call import LocalCall, ShardedCall

_STATISTICS = ("mean", "rstd")


def _norm(call: OperatorCall) -> DimLabels:
    """Tensors with as many dims as the input have its leading dims; weight and bias have none."""
    shape = call.spec("input").shape
    num_leading = len(shape) - len(call.arguments["normalized_shape"])
    parameters = {call.index("weight"), call.index("bias")}
    leading = tuple(range(num_leading))

    def activation(spec: TensorSpec) -> Labels:
        return leading + (None,) * (len(spec.shape) - num_leading)

    def output(index: int, spec: TensorSpec | None) -> Labels | None:
        if spec is None:
            return None
        is_parameter_gradient = "grad_out" in call.arguments and index > 0
        return (None,) * len(spec.shape) if is_parameter_gradient else activation(spec)

    return DimLabels(
        operands=tuple(
            (None,) * len(spec.shape) if index in parameters else activation(spec)
            for index, spec in enumerate(call.operands)
        ),
        outputs=tuple(output(index, spec) for index, spec in enumerate(call.outputs)),
        summed=frozenset(leading),
    )


def _with_contiguous_statistics(sharded: ShardedCall) -> LocalCall:
    """PyTorch's kernel for CPU reads mean and rstd as if they were contiguous (2.15).

    A piece of a replicated tensor is a view of it. Of what is contiguous nothing is copied.
    """
    target = sharded.call.target
    names = tuple(sharded.call.arguments)

    def backward(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        for name in _STATISTICS:
            if isinstance(given.get(name), torch.Tensor):
                given[name] = given[name].contiguous()
        return target(*given.values())

    return sharded.with_arguments(backward)


RULES: Rules = {
    **rules_of(("_fused_rms_norm", "native_layer_norm"), labelled(_norm)),
    **rules_of(
        ("_fused_rms_norm_backward", "native_layer_norm_backward"),
        labelled(_norm),
        localize=_with_contiguous_statistics,
    ),
}
