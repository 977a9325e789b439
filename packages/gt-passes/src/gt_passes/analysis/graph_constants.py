"""What a ``get_attr`` node stands for, by content: constants, and the subgraphs of operators.

A node keeps its identity while the tensor or the graph that it names is replaced, overwritten or
edited in place. Two attributes are the same here only if they hold the same bits, or make the same
calls with the same constants.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from gt_passes._torch_internals import unset_fake_temporarily
from gt_passes.analysis.node_calls import attribute_of
from gt_passes.analysis.outlined_region import OutlinedRegion
from gt_passes.analysis.tensor_signature import signature


@dataclass(frozen=True, slots=True)
class FrozenAttribute:
    """An attribute as it was when it was frozen: equal to those of the same content."""

    kind: str
    content: Hashable

    def __repr__(self) -> str:
        digest = hashlib.sha256(repr(self.content).encode()).hexdigest()
        return f"{self.kind} {digest[:8]}"


def freeze_attribute(graph_module: GraphModule, node: Node) -> FrozenAttribute:
    """The content of what a ``get_attr`` node stands for."""
    value = attribute_of(graph_module, node)
    if isinstance(value, GraphModule):
        return FrozenAttribute("subgraph", _frozen_graph(value))
    if isinstance(value, OutlinedRegion):
        return FrozenAttribute("region", (signature(value), _frozen_graph(value.body)))
    if isinstance(value, torch.Tensor):
        return FrozenAttribute("constant", _frozen_tensor(value))
    return FrozenAttribute("attribute", signature(value))


def freeze_call(
    graph_module: GraphModule, node: Node, numbers: Mapping[Node, Hashable]
) -> tuple[Hashable, ...]:
    """What a node calls, on which values.

    Args:
        graph_module: of the node.
        node: any.
        numbers: the values that it reads; those that are missing are attributes.
    """
    return (
        node.op,
        node.target,
        freeze_argument(graph_module, node.args, numbers),
        freeze_argument(graph_module, node.kwargs, numbers),
    )


def freeze_argument(
    graph_module: GraphModule, argument: object, numbers: Mapping[Node, Hashable]
) -> Hashable:
    """One argument of a call, or several; see ``freeze_call``."""
    if isinstance(argument, Node):
        if argument in numbers:
            return (Node, numbers[argument])
        return freeze_attribute(graph_module, argument)
    if isinstance(argument, (tuple, list)):
        return tuple(freeze_argument(graph_module, item, numbers) for item in argument)
    if isinstance(argument, Mapping):
        return tuple(
            (name, freeze_argument(graph_module, argument[name], numbers)) for name in argument
        )
    if isinstance(argument, slice):
        bounds = (argument.start, argument.stop, argument.step)
        return (slice, freeze_argument(graph_module, bounds, numbers))
    try:
        hash(argument)
    except TypeError:
        return signature(argument)  # equal to itself only
    # 1, 1.0 and True are equal and hash alike, but operators tell them apart.
    return (type(argument), frozen_literal(argument))


def _frozen_graph(graph_module: GraphModule) -> Hashable:
    """The calls of a graph, whatever its nodes are named. What comes in is the caller's affair."""
    numbers: dict[Node, Hashable] = {}
    calls: list[Hashable] = []
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            calls.append(freeze_attribute(graph_module, node))
        elif node.op == "placeholder":
            calls.append(node.op)
        else:
            calls.append(freeze_call(graph_module, node, numbers))
        numbers[node] = len(numbers)
    return tuple(calls)


def _frozen_tensor(tensor: torch.Tensor) -> Hashable:
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta
    if not is_plain or tensor.layout is not torch.strided:
        return (signature(tensor), _SameTensor(tensor))
    return (signature(tensor), _digest(tensor))


def _digest(tensor: torch.Tensor) -> bytes:
    with unset_fake_temporarily():  # passes may run inside of a mode
        elements = tensor.detach().resolve_conj().resolve_neg().cpu().reshape(-1).contiguous()
        num_bytes = elements.numel() * elements.element_size()
        held = ctypes.string_at(elements.data_ptr(), num_bytes) if num_bytes else b""
    return hashlib.sha256(held).digest()


@dataclass(frozen=True, slots=True, eq=False)
class _SameTensor:
    """A tensor whose contents are not compared: equal only to itself."""

    tensor: torch.Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameTensor) and self.tensor is other.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


def frozen_literal(argument: object) -> Hashable:
    """A constant argument as part of a definition, never confused with the number of a value."""
    if isinstance(argument, float):
        return (float, argument.hex())  # NaN is itself, and -0.0 is not 0.0
    if isinstance(argument, (str, torch.dtype, torch.device)) or argument is None:
        return argument
    if isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (type(argument), str(argument.node.expr))
    try:
        hash(argument)
    except TypeError:
        return (type(argument), repr(argument))
    return (type(argument), argument)
