"""Functions that an operator is given, as data: the scores and masks of FlexAttention.

Such a function is a graph of its own in the captured step. Here it is a list of steps that can be
compared, written to a file, read by rules and made a function again. What its result does not need
is left out.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from gt_autoparallel._torch_internals import FakeTensor, OpOverload
from gt_autoparallel.graph.placement_graph import Value, values_in, with_leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionStep:
    """One operator in a function. Its arguments hold ``Value``s, as do the function's results."""

    target: OpOverload | None
    """None takes an item of a result that has several: (value, position)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def operands(self) -> list[int]:
        """The values that it reads."""
        return _values((self.args, self.kwargs))


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionGraph:
    """A function without side effects: ``Value(i)`` is its i-th input, then come its steps."""

    num_inputs: int
    steps: tuple[FunctionStep, ...]
    result: Any
    """A ``Value``, or a list or tuple of them and of None."""

    def read_by(self, value: int) -> Iterator[tuple[int, FunctionStep]]:
        """The steps that read a value, each with the number of its own."""
        for number, step in enumerate(self.steps, self.num_inputs):
            if value in step.operands():
                yield number, step

    def results(self) -> list[int | None]:
        """The value of each leaf of the result; None where it has none."""
        leaves = pytree.tree_leaves(self.result)
        return [leaf.node if isinstance(leaf, Value) else None for leaf in leaves]

    def graph_module(self) -> GraphModule:
        """The function again, to be run or traced."""
        graph = Graph()
        nodes = [graph.placeholder(f"input_{number}") for number in range(self.num_inputs)]

        def filled(leaf: Any) -> Any:
            return nodes[leaf.node] if isinstance(leaf, Value) else leaf

        for step in self.steps:
            args, kwargs = pytree.tree_map(filled, (step.args, step.kwargs))
            nodes.append(graph.call_function(step.target or operator.getitem, args, kwargs))
        graph.output(pytree.tree_map(filled, self.result))
        return GraphModule({}, graph)


def function_problem(graph_module: GraphModule) -> str | None:
    """Why a function cannot be written down; None if it can."""
    for node in graph_module.graph.nodes:
        if node.op == "get_attr" and _literal(graph_module, node) is None:
            return "a function in it holds a tensor of its own; pass it as an argument or buffer"
        is_named = isinstance(node.target, OpOverload) or node.target is operator.getitem
        if node.op == "call_function" and not is_named:
            return f"a function in it calls {node.target}, which is no operator with a schema"
    return None


def function_graph(graph_module: GraphModule) -> FunctionGraph:
    """A captured function as data; one in which ``function_problem`` finds nothing."""
    graph = graph_module.graph
    (output,) = graph.find_nodes(op="output")
    inputs = graph.find_nodes(op="placeholder")
    alive: set[Node] = {output}
    for node in reversed(graph.nodes):
        if node in alive:
            alive.update(node.all_input_nodes)
    number_of: dict[Node, int] = {node: number for number, node in enumerate(inputs)}
    steps: list[FunctionStep] = []
    for node in graph.nodes:
        if node.op not in ("call_function", "get_attr") or node not in alive:
            continue
        number_of[node] = len(inputs) + len(steps)
        literal = _literal(graph_module, node) if node.op == "get_attr" else None
        if literal is not None:
            steps.append(literal)
            continue
        args, kwargs = _mapped((node.args, node.kwargs), number_of)
        target = None if node.target is operator.getitem else node.target
        steps.append(FunctionStep(target=target, args=args, kwargs=kwargs))
    return FunctionGraph(
        num_inputs=len(inputs), steps=tuple(steps), result=_mapped(output.args[0], number_of)
    )


def _literal(graph_module: GraphModule, node: Node) -> FunctionStep | None:
    """The step that makes a number that the function wrote down; None for any other tensor."""
    held = getattr(graph_module, str(node.target), None)
    if not isinstance(held, torch.Tensor) or isinstance(held, FakeTensor) or held.numel() != 1:
        return None
    return FunctionStep(
        target=torch.ops.aten.full.default,
        args=(list(held.shape), held.item()),
        kwargs={"dtype": held.dtype, "device": torch.device(held.device.type)},
    )


def _mapped(tree: Any, number_of: dict[Node, int]) -> Any:
    return with_leaves(partial(_argument, number_of), tree)


def _argument(number_of: dict[Node, int], leaf: Any) -> Any:
    if isinstance(leaf, Node):
        return Value(number_of[leaf])
    # Without its number a device is the current one of whoever runs the function.
    return torch.device(leaf.type) if isinstance(leaf, torch.device) else leaf


def _values(tree: Sequence[Any]) -> list[int]:
    return [value.node for value in values_in(tree)]
