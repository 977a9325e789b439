"""Which nodes of a traced step cannot be planned, and why: all of them at once."""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

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
from gt_autoparallel.graph.function_graph import function_problem
from gt_passes.analysis.collectives import is_collective
from gt_passes.analysis.node_calls import subgraph_of
from gt_passes.analysis.operator_effects import draws_random_numbers
from gt_trace import module_fqn

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
