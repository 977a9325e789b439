"""Backward graphs for gradients that arrive otherwise than they were traced.

A loss may return gradients in any layout: ``output.sum()`` returns an expanded one. Kernels choose
their loops by strides, so a copy in the traced layout can change the last bits. ``for_any_layout``
makes a graph that reads gradients as they are.

A loss may use some outputs only. Autograd then leaves the gradients of the others undefined: it
runs no function behind them, and a parameter behind them alone keeps ``grad`` None.
``without_tangents`` removes the same operators from a graph. Zeros in place of an undefined
gradient would move such parameters by weight decay, and spread infinities and NaNs.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, GraphModule, Node

from gt_trace.errors import InputMismatchError

_ATEN = torch.ops.aten
_JOINS = (_ATEN.cat.default, _ATEN.stack.default)
"""Backwards of operators that divide a tensor: autograd fills the missing parts with zeros."""

_STRIDED = (_ATEN.as_strided.default, _ATEN.as_strided_scatter.default, _ATEN.as_strided_.default)
_NEW = (_ATEN.new_zeros.default, _ATEN.new_empty.default, _ATEN.new_empty_strided.default)


def for_any_layout(graph_module: GraphModule, tangents: Collection[Node]) -> GraphModule | None:
    """Return a backward graph that computes with gradients in the layout in which they arrive.

    Args:
        graph_module: a backward graph; it stays as it is.
        tangents: placeholders of arriving gradients.

    Returns:
        The graph; None if it calls generated code, which is made for the traced layout.

    Raises:
        InputMismatchError: an operator reads fixed strides of an arriving gradient.
    """
    graph = graph_module.graph
    if not all(map(_is_operator, graph.nodes)):
        return None
    depends = _depending_on(graph, tangents)
    fixed: list[Node] = []
    laid_out: set[Node] = set()
    """Results whose strides do not depend on those of a gradient."""

    for node in graph.nodes:
        if node not in depends:
            continue
        is_strided = node.target in _STRIDED
        if node.target in _NEW or (is_strided and (node.args[0] in laid_out)):
            laid_out.add(node)
        elif is_strided and node.args[0] in depends:
            fixed.append(node)
    if fixed:
        readers = ", ".join(f"{node.name} ({node.target})" for node in fixed)
        raise InputMismatchError(
            f"a gradient arrives in another layout than it was traced, and the captured backward "
            f"reads it by fixed strides: {readers}. Make the gradient contiguous: "
            "output.register_hook(torch.Tensor.contiguous)"
        )
    copied = GraphModule(graph_module, copy.deepcopy(graph))
    names = {node.name for node in depends}
    for node in list(copied.graph.nodes):
        if node.name not in names:
            continue
        if node.target is _ATEN.view.default:
            # Autograd's own formulas use ``reshape``; the trace records what it did.
            node.target = _ATEN.reshape.default
        elif isinstance(node.target, OpOverload) and node.target.namespace == "_c10d_functional":
            _make_contiguous(copied.graph, node)
    copied.recompile()
    return copied


def without_tangents(
    graph_module: GraphModule, missing: Collection[Node], tangents: Collection[Node]
) -> GraphModule:
    """Return a backward graph without what undefined gradients would compute.

    Its placeholders are those of ``graph_module``. A result that depends on undefined gradients
    alone is None.

    Args:
        graph_module: a backward graph as it was cut, before passes; it stays as it is.
        missing: placeholders of the gradients that do not arrive.
        tangents: placeholders of all arriving gradients, the missing ones among them.

    Raises:
        InputMismatchError: a function's backward reads missing gradients among others, and what
            autograd would do for it is unknown.
    """
    copied = GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    graph = copied.graph
    names = {node.name for node in missing}
    undefined = {node for node in graph.nodes if node.name in names}
    depends = _depending_on(graph, [n for n in graph.nodes if n.name in {t.name for t in tangents}])
    functions = _functions(depends)
    seen: set[Any] = set()
    for node in list(graph.nodes):
        if node not in depends or node in undefined or node.op == "placeholder":
            continue
        if node.meta.get("is_gradient_acc"):
            _accumulate(node, undefined)
            continue
        key = _function_of(node)
        if key in seen:
            continue
        seen.add(key)
        _run_function(functions[key], depends, undefined)
    output = graph.output_node()
    output.args = ([None if value in undefined else value for value in _results(output)],)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    copied.recompile()
    return copied


def _accumulate(node: Node, undefined: set[Node]) -> None:
    """Take the one defined gradient for a sum with an undefined one."""
    defined = [source for source in node.all_input_nodes if source not in undefined]
    if not defined:
        undefined.add(node)
    elif len(defined) < len(node.all_input_nodes):
        node.replace_all_uses_with(defined[0])


def _run_function(nodes: Sequence[Node], depends: set[Node], undefined: set[Node]) -> None:
    """Decide what the backward of one function computes."""
    inside = set(nodes)
    entering = dict.fromkeys(
        source
        for node in nodes
        for source in node.all_input_nodes
        if source in depends and source not in inside
    )
    gone = [source for source in entering if source in undefined]
    if not gone:
        return
    if len(gone) == len(entering):
        undefined.update(nodes)
        return
    for node in nodes:
        if not any(source in undefined for source in node.all_input_nodes):
            continue
        if all(source in undefined or source not in depends for source in node.all_input_nodes):
            problem = None if _leads_to_optional(node, inside) else node
            undefined.add(node)
        else:
            problem = None if _replace_undefined(node, undefined) else node
        if problem is not None:
            raise InputMismatchError(
                f"some outputs got no gradient, and {problem.name} ({problem.target}) belongs to "
                "the backward of a function with several results, some of them unused. What "
                "autograd computes there is unknown. Use all outputs in the loss, or detach the "
                "unused ones in the module"
            )


def _leads_to_optional(node: Node, inside: set[Node]) -> bool:
    """Check that only optional arguments of the same function read a node."""
    return bool(node.users) and all(
        user in inside and _takes_none(user, node) for user in node.users
    )


def _replace_undefined(node: Node, undefined: set[Node]) -> bool:
    """Give an operator what autograd gives for undefined gradients; whether that is known."""
    gone = [source for source in node.all_input_nodes if source in undefined]
    if node.target in _JOINS:
        for source in gone:
            node.replace_input_with(source, _zeros_like(node, source))
        return True
    if not all(_takes_none(node, source) for source in gone):
        return False
    node.args = tuple(None if each in gone else each for each in node.args)
    node.kwargs = {name: None if each in gone else each for name, each in node.kwargs.items()}
    return True


def _zeros_like(user: Node, source: Node) -> Node:
    value = source.meta["val"]
    with user.graph.inserting_before(user):
        zeros = user.graph.call_function(
            _ATEN.zeros.default,
            (list(value.shape),),
            {"dtype": value.dtype, "device": value.device},
        )
    zeros.meta = {**source.meta}
    return zeros


def _takes_none(node: Node, source: Node) -> bool:
    """Check that an operator takes None for every argument that is ``source``."""
    if not isinstance(node.target, OpOverload):
        return False
    arguments = node.target._schema.arguments
    by_name = {each.name: each for each in arguments}
    given = [
        *zip(arguments, node.args, strict=False),
        *((by_name[name], value) for name, value in node.kwargs.items()),
    ]
    found = [str(each.type) for each, value in given if value is source]
    return bool(found) and all(each == "Optional[Tensor]" for each in found)


def _functions(depends: set[Node]) -> dict[Any, list[Node]]:
    found: dict[Any, list[Node]] = {}
    for node in depends:
        if node.op != "placeholder" and not node.meta.get("is_gradient_acc"):
            found.setdefault(_function_of(node), []).append(node)
    order = {node: index for index, node in enumerate(next(iter(depends)).graph.nodes)}
    return {key: sorted(nodes, key=order.__getitem__) for key, nodes in found.items()}


def _function_of(node: Node) -> Any:
    """Return a key of the autograd function whose backward a node belongs to."""
    number = node.meta.get("seq_nr")
    return node if number is None else number


def _depending_on(graph: Graph, tangents: Collection[Node]) -> set[Node]:
    """Return the nodes that are computed from arriving gradients, these included."""
    found = set(tangents)
    for node in graph.nodes:
        if node.op != "output" and any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _is_operator(node: Node) -> bool:
    if node.op != "call_function":
        return node.op in ("placeholder", "output", "get_attr")
    return node.target is operator.getitem or isinstance(
        node.target, OpOverload | HigherOrderOperator
    )


def _make_contiguous(graph: Graph, node: Node) -> None:
    """Let a collective read contiguous tensors, as its Python wrapper does."""
    for source in list(node.all_input_nodes):
        if not isinstance(source.meta.get("val"), torch.Tensor):
            continue
        with graph.inserting_before(node):
            contiguous = graph.call_function(_ATEN.contiguous.default, (source,))
        contiguous.meta = {**source.meta}
        node.replace_input_with(source, contiguous)


def _results(output: Node) -> Sequence[Any]:
    values: Any = output.args[0]
    return tuple(values)
