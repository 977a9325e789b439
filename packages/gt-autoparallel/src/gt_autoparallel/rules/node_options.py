"""Every option of every kind of node, and errors that name all operators without a rule."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

from gt_autoparallel._torch_internals import (
    HigherOrderOperator,
    OpOverload,
    draws_random_numbers,
    operator_name,
    writes_to_arguments,
)
from gt_autoparallel.errors import UnsupportedOperatorError
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.options import AxisOption, NodeOption
from gt_autoparallel.graph.placement_graph import SINKS, PlacementGraph, PlacementNode, TensorSpec
from gt_autoparallel.rules import registry
from gt_autoparallel.rules.dim_labels import REPLICATE
from gt_autoparallel.rules.mesh_options import combine, layouts_of
from gt_autoparallel.rules.operator_call import OperatorCall, operator_call

_CACHE: dict[Hashable, tuple[NodeOption, ...]] = {}
_MAX_CACHED = 50_000
_SOURCES = ("parameter", "buffer", "input", "tangent")


def node_options(
    node: PlacementNode,
    operands: tuple[TensorSpec, ...],
    mesh: MeshShape,
    *,
    replicate_unknown: Collection[str] = (),
) -> tuple[NodeOption, ...]:
    """Every option of a node on a mesh, without duplicates, in a fixed order.

    The first option of an operator is to run it whole on every rank.

    Args:
        node: of any kind but experts.
        operands: the global tensors of its operands, in their order.
        mesh: the axes.
        replicate_unknown: names of operators (``mylib.gate.default`` or ``mylib.gate``) that run
            whole on every rank though no rule knows them, or though they draw random numbers:
            then every rank must draw the same.

    Raises:
        UnsupportedOperatorError: no rule knows the operator, and it is not in
            ``replicate_unknown``.
        ValueError: the node's options are not a matter of rules.
    """
    if node.kind in _SOURCES:
        layouts = layouts_of(node.output(), mesh)
        return tuple(NodeOption(operands=(), outputs=(layout,)) for layout in layouts)
    if node.kind == "share":
        layouts = layouts_of(node.output(), mesh, allow_partial=True)
        return tuple(NodeOption(operands=(layout,), outputs=(layout,)) for layout in layouts)
    if node.kind in SINKS:
        layouts = layouts_of(operands[0], mesh)
        return tuple(NodeOption(operands=(layout,), outputs=()) for layout in layouts)
    if node.kind != "operator":
        raise ValueError(f"node {node.name!r} is of kind {node.kind!r}: no rule makes its options")
    key = _cache_key(node, operands, mesh, frozenset(replicate_unknown))
    cached = _CACHE.get(key)
    if cached is not None:
        return cached
    problem = _problem_of(node, operands, replicate_unknown)
    if problem is not None:
        raise UnsupportedOperatorError(_message((_line(problem, (node,)),)))
    if len(_CACHE) >= _MAX_CACHED:
        _CACHE.clear()
    options = _operator_options(node, operands, mesh, replicate_unknown)
    _CACHE[key] = options
    return options


def check_operators(graph: PlacementGraph, *, replicate_unknown: Collection[str] = ()) -> None:
    """Refuse a graph with operators that cannot be placed, naming all of them at once.

    Raises:
        UnsupportedOperatorError: some operators have no rule.
    """
    problems: dict[tuple[str, str], list[PlacementNode]] = {}
    for node in graph.of_kind("operator"):
        reason = _problem_of(node, graph.operand_specs(node), replicate_unknown)
        if reason is not None:
            problems.setdefault((str(node.target), reason), []).append(node)
    if problems:
        raise UnsupportedOperatorError(
            _message([_line(reason, nodes) for (_, reason), nodes in problems.items()])
        )


def replicated_operators(
    graph: PlacementGraph, replicate_unknown: Collection[str]
) -> tuple[PlacementNode, ...]:
    """The nodes of a graph that run whole on every rank only because the caller said so."""
    return tuple(
        node
        for node in graph.of_kind("operator")
        if _is_opted_in(node.target, replicate_unknown)
        and _reason(node, graph.operand_specs(node)) is not None
    )


def _operator_options(
    node: PlacementNode,
    operands: tuple[TensorSpec, ...],
    mesh: MeshShape,
    replicate_unknown: Collection[str],
) -> tuple[NodeOption, ...]:
    whole = AxisOption(
        operands=(REPLICATE,) * len(operands),
        outputs=tuple(None if spec is None else REPLICATE for spec in node.outputs),
    )
    rule = None if _reason(node, operands) is not None else registry.find_rule(node.target)
    if rule is None:
        return combine((whole,), operands, node.outputs, mesh)
    call = operator_call(node, operands)
    options = (whole, *rule.options(call))
    _check_options(node, operands, options)
    combined = combine(options, operands, node.outputs, mesh)
    fits = rule.fits
    if fits is None:
        return combined
    return tuple(option for option in combined if fits(call, option, mesh))


def _check_options(
    node: PlacementNode, operands: tuple[TensorSpec, ...], options: Sequence[AxisOption]
) -> None:
    """Refuse the options of a rule that do not speak of this call's tensors."""
    of_tensors = tuple(spec is not None for spec in node.outputs)
    for option in options:
        given = tuple(placement is not None for placement in option.outputs)
        if len(option.operands) != len(operands) or given != of_tensors:
            raise ValueError(
                f"the rule of {node.target} gives an option with {len(option.operands)} operands "
                f"and outputs {option.outputs!r}; allowed: a placement for each of the "
                f"{len(operands)} operands, and for each output one if it is a tensor, else None "
                f"(tensors: {of_tensors!r})"
            )


def _problem_of(
    node: PlacementNode, operands: tuple[TensorSpec, ...], replicate_unknown: Collection[str]
) -> str | None:
    """Why a node cannot be placed; None if it can."""
    return None if _is_opted_in(node.target, replicate_unknown) else _reason(node, operands)


def _line(reason: str, nodes: Sequence[PlacementNode]) -> str:
    """An operator, why it cannot be placed, and where it stands first."""
    first = nodes[0]
    where = f" in module {first.module!r}" if first.module else ""
    where += f", at {first.line}" if first.line else ""
    others = f"; {len(nodes)} nodes in all" if len(nodes) > 1 else ""
    return f"{first.target}: {reason} (node {first.name!r}{where}{others})"


def _reason(node: PlacementNode, operands: tuple[TensorSpec, ...]) -> str | None:
    target = node.target
    if isinstance(target, HigherOrderOperator):
        known = registry.find_rule(target)
        return None if known is not None else "no rule says how it may be sharded"
    if not isinstance(target, OpOverload):
        return "not an operator with a schema"
    if writes_to_arguments(target):
        return "writes to its arguments; plan the form that returns its result"
    if draws_random_numbers(target) and _is_random(operator_call(node, operands)):
        return "draws random numbers, which differ with the placement"
    if registry.find_rule(target) is None:
        return "no rule says how it may be sharded"
    return None


def _is_random(call: OperatorCall) -> bool:
    """Attention kernels draw random numbers for dropout only."""
    return bool(call.arguments.get("dropout_p", 1.0))


def _is_opted_in(target: Any, names: Collection[str]) -> bool:
    is_operator = isinstance(target, (OpOverload, HigherOrderOperator))
    name = operator_name(target) if is_operator else str(target)
    return name in names or name.rpartition(".")[0] in names


def _message(problems: Sequence[str]) -> str:
    subject = "an operator has" if len(problems) == 1 else f"{len(problems)} operators have"
    lines = "".join(f"\n- {problem}" for problem in problems)
    return (
        f"{subject} no placement:{lines}\nTeach the planner an operator with "
        "gt_autoparallel.register_rule(name, rule), or run it whole on every rank with "
        "replicate_unknown=[name]."
    )


def _cache_key(
    node: PlacementNode,
    operands: tuple[TensorSpec, ...],
    mesh: MeshShape,
    replicate_unknown: frozenset[str],
) -> Hashable:
    return (
        str(node.target),
        node.constants,
        tuple((spec.shape, spec.dtype) for spec in operands),
        tuple(None if spec is None else (spec.shape, spec.dtype) for spec in node.outputs),
        mesh.sizes,
        replicate_unknown,
        registry.version(),
    )
