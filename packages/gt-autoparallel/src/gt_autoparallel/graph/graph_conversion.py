"""From the nodes of a traced step to the nodes that are planned.

What only renames a value is left out (``detach``, a view of the same shape), and what is computed
twice in one layer and phase is computed once. Names are those of modules and operators, so that
they are the same in every process: ``layers.0.attention.wq/mm``, ``.../grad/mm``. Share nodes and
numbers come last (``draft_nodes``).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from gt_autoparallel._torch_internals import (
    HigherOrderOperator,
    OpOverload,
    operator_name,
    operator_path,
    writes_to_arguments,
)
from gt_autoparallel.errors import UnsupportedModelError
from gt_autoparallel.graph.draft_nodes import DraftNode, number_nodes
from gt_autoparallel.graph.experts import EXPERTS, EXPERTS_BACKWARD
from gt_autoparallel.graph.function_graph import function_graph, function_problem
from gt_autoparallel.graph.layer_names import layer_of_module
from gt_autoparallel.graph.parameter_chains import is_cast
from gt_autoparallel.graph.placement_graph import (
    InputLeaf,
    ModelInterface,
    NodeKind,
    NodePhase,
    PlacementGraph,
    ResultLeaf,
    TensorSpec,
    Value,
    values_in,
    with_leaves,
)
from gt_passes.analysis.collectives import is_collective
from gt_passes.analysis.node_calls import subgraph_of
from gt_passes.analysis.operator_effects import draws_random_numbers
from gt_trace import ArgumentSignature, GraphInput, module_fqn, phase_of


@torch.library.custom_op("gt_autoparallel::tangent_of", mutates_args=())
def _tangent_of(output: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("stands for the gradient of an output while a step is captured")


@_tangent_of.register_fake
def _(output: torch.Tensor) -> torch.Tensor:
    return output.new_empty(output.shape)


@torch.library.custom_op("gt_autoparallel::reduce_here", mutates_args=())
def _reduce_here(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clone()


@_reduce_here.register_fake
def _(gradient: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gradient)


TANGENT_OF = torch.ops.gt_autoparallel.tangent_of.default
"""Becomes a node of kind ``tangent``."""

REDUCE_HERE = torch.ops.gt_autoparallel.reduce_here.default
"""Becomes a share node before a gradient's cast, so that it is reduced in the dtype before it."""

_aten = torch.ops.aten
_RENAMES = frozenset({_aten.detach.default, _aten.alias.default, _aten.lift_fresh_copy.default})
_CHECKS = frozenset({_aten._assert_async.default, _aten._assert_async.msg})
"""Look at a value and give nothing. What only they need is dropped with them."""

_VIEWS = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.expand.default,
        _aten.slice.Tensor,
        _aten._reshape_alias.default,
    }
)
"""Rename a value if they leave its shape and strides as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedOutput:
    """One leaf of what the model returned while it was traced."""

    name: str
    is_tensor: bool
    is_differentiable: bool = False
    """Whether a gradient of it is an input of the backward: in order, ``TANGENT_OF`` nodes."""

    constant: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """A traced step, and what its inputs and outputs stand for."""

    graph: Graph
    inputs: Sequence[GraphInput]
    """What each placeholder stands for."""

    arguments: Sequence[ArgumentSignature]
    input_spec: pytree.TreeSpec
    output_spec: pytree.TreeSpec
    outputs: Sequence[CapturedOutput]
    """What each leaf is that the model returns."""

    gradients: Sequence[str]
    """Names of the parameters whose gradients follow the outputs."""

    input_gradients: Sequence[str]
    """Names of the inputs whose gradients follow those of the parameters."""

    literals: Mapping[str, torch.Tensor]
    """Tensors that the graph holds itself."""


def placement_graph(
    step: CapturedStep, *, allowed_random_operators: frozenset[str] = frozenset()
) -> PlacementGraph:
    """The graph that is planned.

    Raises:
        UnsupportedModelError: nodes that cannot be planned; all of them are named.
    """
    refuse_unsupported(step.graph, step.literals, allowed_random_operators=allowed_random_operators)
    return _Draft(step).finish()


class _Draft:
    """Collects nodes, then puts share nodes in and numbers them."""

    def __init__(self, step: CapturedStep) -> None:
        self._step = step
        self._nodes: list[DraftNode] = []
        self._value_of: dict[Node, Any] = {}
        """From a traced node to a ``Value``, or a tree of them for several outputs; to a function
        that an operator is given, as a ``FunctionGraph``."""

        self._known: dict[Any, int] = {}
        """From what a node computes, in which layer and phase, to the node that does so."""

        self._input_nodes: dict[str, int] = {}
        self._tangents: list[int] = []
        self._outputs: list[int] = []
        self._aliases: dict[str, str] = {}
        (self._result,) = step.graph.find_nodes(op="output")

    def finish(self) -> PlacementGraph:
        for placeholder, source in zip(
            self._step.graph.find_nodes(op="placeholder"), self._step.inputs, strict=True
        ):
            self._add_source(placeholder, source)
        for node in self._step.graph.nodes:
            if node.op == "get_attr":
                self._add_literal(node)
            elif node.op == "call_function":
                self._add_operator(node)
        self._add_sinks()
        numbered = number_nodes(self._nodes)
        return PlacementGraph(
            nodes=numbered.nodes,
            parameter_aliases=self._aliases,
            interface=self._interface(numbered.number_of),
        )

    # ---- nodes of each kind ----------------------------------------------------------------

    def _add_source(self, placeholder: Node, source: GraphInput) -> None:
        kind: NodeKind = "input"
        module = ""
        if source.kind == "parameter" or source.kind == "buffer":
            kind = source.kind
            module = source.name.rpartition(".")[0]
            self._aliases.update(dict.fromkeys(source.aliases, source.name))
        index = self._append(
            DraftNode(
                kind=kind,
                target=source.name,
                outputs=(_spec(placeholder.meta["val"]),),
                module=module,
                name=source.name,
                shared=kind == "parameter",
            )
        )
        if kind == "input":
            self._input_nodes[source.name] = index
        self._value_of[placeholder] = Value(index)

    def _add_literal(self, node: Node) -> None:
        """A number that the forward wrote down as a tensor: made anew by each rank."""
        function = subgraph_of(node)
        if function is not None:
            self._value_of[node] = function_graph(function)
            return
        literal = self._step.literals[str(node.target)]
        value = literal.flatten()[0].item()
        index = self._append(
            DraftNode(
                kind="operator",
                target=_aten.full.default,
                args=(list(literal.shape), value),
                kwargs={"dtype": literal.dtype, "device": literal.device},
                outputs=(_spec(literal),),
                name="literal",
            )
        )
        self._value_of[node] = Value(index)

    def _add_operator(self, node: Node) -> None:
        if node.target is operator.getitem:
            source, position = node.args
            assert isinstance(source, Node)
            self._value_of[node] = self._value_of[source][position]
            return
        assert isinstance(node.target, (OpOverload, HigherOrderOperator))  # others were refused
        if node.target is TANGENT_OF:
            self._add_tangent(node)
            return
        if node.target in _CHECKS:
            return  # of what the caller gave: it makes nothing that could be placed
        if _only_renames(node):
            (source,) = node.all_input_nodes
            self._value_of[node] = self._value_of[source]
            return
        args, kwargs = with_leaves(self._mapped, (node.args, node.kwargs))
        self._value_of[node] = self._computed(node, args, kwargs)

    def _computed(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands = values_in((args, kwargs))
        # What follows the backward, such as a gradient's cast, belongs to it.
        is_backward = phase_of(node) == "backward" or any(
            self._nodes[value.node].phase == "backward" for value in operands
        )
        phase: NodePhase = "backward" if is_backward else "forward"
        module = module_fqn(node) or self._module_of(operands, phase)
        values, structure = pytree.tree_flatten(node.meta["val"])
        kind: NodeKind = "operator"
        target: Any = node.target
        if target is _aten._unsafe_view.default:  # a view of what nobody else holds
            target = _aten.view.default
        word = _word(target)
        if target in (EXPERTS, EXPERTS_BACKWARD):
            kind = word = "experts"
            target = module = args[-1]
        # As text, in which 1, 1.0 and True differ.
        key = (target, repr((args, sorted(kwargs.items()))), layer_of_module(module), phase)
        index = self._known.get(key)
        if index is None or draws_random_numbers(node):
            words = (module, "grad" if phase == "backward" else "", word)
            index = self._append(
                DraftNode(
                    kind="share" if target is REDUCE_HERE else kind,
                    target="" if target is REDUCE_HERE else target,
                    args=args,
                    kwargs=kwargs,
                    outputs=tuple(map(_spec, values)),
                    module=module,
                    phase=phase,
                    name="/".join(word for word in words if word),
                    operands=operands,
                    line=line_of(node),
                )
            )
            self._known[key] = index
            self._follow_parameter(index)
        return pytree.tree_unflatten(
            [Value(index, position) for position in range(len(values))], structure
        )

    def _follow_parameter(self, index: int) -> None:
        """A cast of a parameter is what is shared, if nothing else reads the parameter."""
        node = self._nodes[index]
        node.shared = len(node.operands) == 1 and (
            self._nodes[node.operands[0].node].shared and is_cast(node)
        )

    def _add_tangent(self, node: Node) -> None:
        differentiable = [output for output in self._step.outputs if output.is_differentiable]
        name = f"{differentiable[len(self._tangents)].name}/tangent"
        index = self._append(
            DraftNode(
                kind="tangent",
                target=name,
                outputs=(_spec(node.meta["val"]),),
                phase="backward",
                name=name,
            )
        )
        self._value_of[node] = Value(index)
        self._tangents.append(index)

    def _add_sinks(self) -> None:
        results: Any = self._result.args[0]
        outputs = [output.name for output in self._step.outputs if output.is_tensor]
        sinks: list[tuple[NodeKind, str]] = [("output", name) for name in outputs]
        sinks += [("gradient", name) for name in self._step.gradients]
        sinks += [("input_gradient", name) for name in self._step.input_gradients]
        for (kind, name), result in zip(sinks, results, strict=True):
            value = self._value_of[result]
            index = self._append(
                DraftNode(
                    kind=kind,
                    target=name,
                    args=(value,),
                    module=name.rpartition(".")[0] if kind == "gradient" else "",
                    phase="forward" if kind == "output" else "backward",
                    name=name if kind == "output" else f"{name}/gradient",
                    operands=[value],
                )
            )
            if kind == "output":
                self._outputs.append(index)

    # ---- small parts -----------------------------------------------------------------------

    def _append(self, node: DraftNode) -> int:
        self._nodes.append(node)
        return len(self._nodes) - 1

    def _mapped(self, argument: Any) -> Any:
        return self._value_of[argument] if isinstance(argument, Node) else argument

    def _module_of(self, operands: Sequence[Value], phase: NodePhase) -> str:
        """The module of a node that was traced in none.

        Of a backward node that no forward node caused (a sum of gradients) it is that of its last
        operand, which belongs to the layer that is just done; of a parameter's cast, the
        parameter's.
        """
        if phase == "forward":
            of_parameter = len(operands) == 1 and self._nodes[operands[0].node].shared
            return self._nodes[operands[0].node].module if of_parameter else ""
        if not operands:
            return ""
        return self._nodes[max(value.node for value in operands)].module

    # ---- the finished graph ----------------------------------------------------------------

    def _interface(self, number_of: Mapping[int, int]) -> ModelInterface:
        inputs = [
            InputLeaf(
                name=argument.name,
                node=number_of.get(self._input_nodes.get(argument.name, -1)),
                is_tensor=argument.is_tensor,
                constant=argument.constant,
            )
            for argument in self._step.arguments
        ]
        sinks, tangents = iter(self._outputs), iter(self._tangents)
        outputs = [
            ResultLeaf(
                name=output.name,
                node=number_of[next(sinks)] if output.is_tensor else None,
                tangent=number_of.get(next(tangents)) if output.is_differentiable else None,
                constant=output.constant,
            )
            for output in self._step.outputs
        ]
        return ModelInterface(
            input_spec=self._step.input_spec,
            inputs=tuple(inputs),
            output_spec=self._step.output_spec,
            outputs=tuple(outputs),
        )


# ---- reading traced nodes ----------------------------------------------------------------------


def _spec(value: object) -> TensorSpec | None:
    if not isinstance(value, torch.Tensor):
        return None
    return TensorSpec(
        shape=tuple(map(int, value.shape)),
        stride=tuple(map(int, value.stride())),
        dtype=value.dtype,
    )


def _word(target: OpOverload | HigherOrderOperator) -> str:
    """An operator's name without its namespace."""
    if isinstance(target, HigherOrderOperator):
        return operator_name(target).rpartition(".")[2]
    return operator_path(target)[1]


def _only_renames(node: Node) -> bool:
    if node.target in _RENAMES:
        return True
    if node.target not in _VIEWS:
        return False
    source = node.args[0]
    assert isinstance(source, Node)
    return _spec(source.meta["val"]) == _spec(node.meta["val"])


# Which nodes of a traced step cannot be planned, and why: all of them at once.
_PLACE = re.compile(r'File "(.+)", line (\d+)')

FLEX_ATTENTION = frozenset({"higher_order.flex_attention", "higher_order.flex_attention_backward"})
"""The operators of operators that are planned. Their scores and masks are functions."""


def refuse_unsupported(
    graph: Graph, literals: Mapping[str, torch.Tensor], *, allowed_random_operators: Collection[str]
) -> None:
    """Refuse a traced step with nodes that have no placement.

    Raises:
        UnsupportedModelError: names every operator that cannot be planned, why, and where it
            stands first.
    """
    problems: dict[str, str] = {}
    for node in graph.nodes:
        problem = _problem(node, literals, allowed_random_operators)
        if problem is not None:
            line = line_of(node)
            where = f"first in {module_fqn(node) or 'the model'}{f', at {line}' if line else ''}"
            problems.setdefault(problem, f"{problem} ({where})")
    if problems:
        raise UnsupportedModelError(
            "the model cannot be planned:\n  " + "\n  ".join(problems.values())
        )


def _problem(
    node: Node, literals: Mapping[str, torch.Tensor], allowed_random_operators: Collection[str]
) -> str | None:
    """What keeps a node from being planned; None if nothing does."""
    if node.op == "get_attr":
        if subgraph_of(node) is not None:
            return None  # a function, which belongs to the operator that it is given
        literal = literals.get(str(node.target))
        if literal is not None and literal.numel() == 0:
            return "an empty tensor that the forward makes from a list; leave it out"
        if literal is not None and bool((literal == literal.flatten()[0]).all()):
            return None
        return "a tensor that the forward makes from a list of numbers; register it as a buffer"
    if node.op != "call_function" or node.target is operator.getitem:
        return None
    if isinstance(node.target, HigherOrderOperator):
        return _problem_of_functions(node, operator_name(node.target))
    if not isinstance(node.target, OpOverload):
        return f"{node.target}: depends on the data or sizes of tensors"
    name = ".".join(operator_path(node.target)[:2])
    if is_collective(node):
        return f"{name}: the model already communicates; plan it before it is parallelized"
    if writes_to_arguments(node.target):
        return f"{name}: writes to its arguments and could not be made functional"
    allowed = name in allowed_random_operators or str(node.target) in allowed_random_operators
    if draws_random_numbers(node) and not allowed:
        return (
            f"{name}: draws random numbers, and must draw the same on every rank; seed all ranks "
            "alike and allow it by name (replicate_unknown=), or switch it off"
        )
    if _depends_on_data(node.meta.get("val")):
        return f"{name}: its result has a size or a value that depends on the data of tensors"
    return None


def _problem_of_functions(node: Node, name: str) -> str | None:
    """What keeps an operator of operators from being planned."""
    if name not in FLEX_ATTENTION:
        return f"{name}: operators of operators have no placement rule, but for FlexAttention"
    functions = filter(None, map(subgraph_of, node.all_input_nodes))
    problems = filter(None, map(function_problem, functions))
    return next((f"{name}: {problem}" for problem in problems), None)


def line_of(node: Node) -> str:
    """The line of the model that called an operator: ``model.py:12: 'x = y + z'``; "" if none."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    if len(lines) < 2:
        return ""
    place = _PLACE.match(lines[-2].strip())
    where = f"{Path(place[1]).name}:{place[2]}: " if place else ""
    return f"{where}{lines[-1].strip()!r}"


def _depends_on_data(recorded: object) -> bool:
    """Whether a recorded value has sizes that are no numbers, or is a number itself."""
    values: Iterable[object] = pytree.tree_leaves(recorded)
    for value in values:
        if isinstance(value, torch.Tensor):
            if any(not isinstance(size, int) for size in value.shape):
                return True
        elif value is not None:
            return True
    return False
