"""Convolutions: samples and output channels may be sharded, not what the window slides over.

Without groups an output channel needs every input channel. Gradients sum over what they lack:
samples for weight and bias, output channels for the input.
"""

from __future__ import annotations

from gt_autoparallel.rules.dim_labels import DimLabels, Labels
from gt_autoparallel.rules.operator_call import OperatorCall
from gt_autoparallel.rules.operator_rule import Rules, labelled, rules_of
from gt_autoparallel.rules.sharded_call import LocalCall, ShardedCall


def _labels(call: OperatorCall) -> dict[str, Labels]:
    window = (None,) * (len(call.spec("weight").shape) - 2)
    channels = "channels" if call.arguments["groups"] == 1 else None
    weight = (None, channels) if call.arguments["transposed"] else (channels, None)
    return {
        "input": ("samples", None, *window),
        "weight": (*weight, *window),
        "bias": (channels,),
        "output": ("samples", channels, *window),
    }


def _convolution(call: OperatorCall) -> DimLabels:
    labels = _labels(call)
    names = ("input", "weight", "bias")[: len(call.operands)]
    return DimLabels(operands=tuple(labels[name] for name in names), outputs=(labels["output"],))


def _convolution_backward(call: OperatorCall) -> DimLabels:
    labels = _labels(call)
    gradients = (labels["input"], labels["weight"], labels["bias"])
    return DimLabels(
        operands=(labels["output"], labels["input"], labels["weight"]),
        outputs=tuple(
            None if spec is None else of_gradient
            for spec, of_gradient in zip(call.outputs, gradients, strict=True)
        ),
        summed=frozenset({"samples", "channels"}),
    )


def _bias_sizes_to_local(sharded: ShardedCall) -> LocalCall:
    if sharded.call.outputs[2] is None:
        return sharded.with_arguments()
    return sharded.with_arguments(bias_sizes=list(sharded.output_shape(2)))


RULES: Rules = {
    **rules_of(("convolution",), labelled(_convolution)),
    **rules_of(
        ("convolution_backward",), labelled(_convolution_backward), localize=_bias_sizes_to_local
    ),
}
