"""When two regions are the same program, so that one compilation serves both.

A model repeats its layers. Two outlines are equal when the same operators are called with the same
constants on values that correspond, and their inputs agree in all but contents.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping

from torch.fx import GraphModule, Node

from gt_passes._torch_internals import value_of
from gt_passes.analysis.outlined_region import Outline
from gt_passes.analysis.tensor_signature import TensorSignature, signature
from gt_passes.compilation.inductor_regions import is_flex_attention

_ALIGNMENT_BYTES = 16
"""Of the widest load of a GPU."""


def region_identity(
    graph_module: GraphModule, outline: Outline, options: Mapping[str, object]
) -> Hashable:
    """What decides the compiled form of a region: equal for regions that one program serves.

    Linear in the number of nodes. A constant that cannot be compared is equal to itself only.
    """
    numbers: dict[Node, Hashable] = {node: number for number, node in enumerate(outline.inputs)}
    sign = _sign_elements if _reads_elements_only(outline) else signature
    inputs = tuple(sign(value_of(node)) for node in outline.inputs)
    calls = []
    for node in outline.nodes:
        calls.append(_call(graph_module, node, numbers))
        numbers[node] = len(numbers)
    outputs = tuple(numbers[node] for node in outline.outputs)
    return (inputs, tuple(calls), outputs, _key(graph_module, dict(options), numbers))


def _reads_elements_only(outline: Outline) -> bool:
    """Whether a region asks its inputs for their elements, and not where they lie in memory."""
    calls = (node for node in outline.nodes if node.target is not operator.getitem)
    return all(map(is_flex_attention, calls))


def _sign_elements(value: object) -> Hashable:
    """A signature without the place in the storage: chunks are parts of one tensor.

    But for its alignment, by which Inductor chooses loads.
    """
    signed = signature(value)
    if not isinstance(signed, TensorSignature) or not isinstance(signed.storage_offset, int):
        return signed
    return signed._replace(
        storage_offset=signed.storage_offset * signed.dtype.itemsize % _ALIGNMENT_BYTES
    )


def _call(
    graph_module: GraphModule, node: Node, numbers: Mapping[Node, Hashable]
) -> tuple[Hashable, ...]:
    return (
        node.op,
        node.target,
        _key(graph_module, node.args, numbers),
        _key(graph_module, node.kwargs, numbers),
    )


def _key(graph_module: GraphModule, argument: object, numbers: Mapping[Node, Hashable]) -> Hashable:
    if isinstance(argument, Node):
        if argument in numbers:
            return (Node, numbers[argument])
        return _subgraph_key(graph_module, argument)
    if isinstance(argument, (tuple, list)):
        return tuple(_key(graph_module, item, numbers) for item in argument)
    if isinstance(argument, Mapping):
        return tuple((name, _key(graph_module, argument[name], numbers)) for name in argument)
    if isinstance(argument, slice):
        return (slice, _key(graph_module, (argument.start, argument.stop, argument.step), numbers))
    try:
        hash(argument)
    except TypeError:
        return (type(argument), id(argument))
    # 1, 1.0 and True are equal and hash alike, but operators tell them apart.
    return (type(argument), argument)


def _subgraph_key(graph_module: GraphModule, attribute: Node) -> Hashable:
    """The identity of a higher-order operator's subgraph: its calls, whatever it is named."""
    subgraph = graph_module.get_submodule(str(attribute.target))
    if not isinstance(subgraph, GraphModule):
        return (type(subgraph), id(subgraph))
    numbers: dict[Node, Hashable] = {}
    calls: list[Hashable] = []
    for node in subgraph.graph.nodes:
        if node.op == "get_attr":  # a constant or a deeper subgraph: the same as itself only
            calls.append((node.op, id(_attribute(subgraph, str(node.target)))))
        elif node.op == "placeholder":
            calls.append((node.op, signature(value_of(node))))
        else:
            calls.append(_call(subgraph, node, numbers))
        numbers[node] = len(numbers)
    return (GraphModule, tuple(calls))


def _attribute(graph_module: GraphModule, target: str) -> object:
    value: object = graph_module
    for part in target.split("."):
        value = getattr(value, part)
    return value
