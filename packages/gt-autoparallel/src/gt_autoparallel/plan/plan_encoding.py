"""A plan as JSON values and back: what a plan file holds.

Layouts are written as people read them (``"S(0) R"``), so that a plan file can be searched and
compared with ordinary tools. Prices are not written: only their digest, and who reads a plan brings
a cost model that has it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from gt_autoparallel.argument_checks import check_arguments, prices_problem
from gt_autoparallel.errors import PlanMismatchError
from gt_autoparallel.graph.graph_encoding import (
    canonical_json,
    decode_graph,
    decode_layout,
    encode_graph,
    encode_layout,
)
from gt_autoparallel.graph.layouts import Layout, MeshShape
from gt_autoparallel.graph.options import AxisOption, NodeOption
from gt_autoparallel.graph.placement_graph import PlacementGraph, Use
from gt_autoparallel.graph.redistribution import RedistributionStep
from gt_autoparallel.graph.redistribution_ways import StepKind
from gt_autoparallel.plan.judgement import Candidate, JudgedStep, PlanJudgement
from gt_autoparallel.plan.placement_plan import (
    ModelSignature,
    PlacementPlan,
    PlannedRedistribution,
    PlannedWindow,
    SolverReport,
    plan_problem,
)
from gt_autoparallel.prices.costs import StepPrices
from gt_autoparallel.prices.memory import MemoryBreakdown
from gt_autoparallel.prices.microbatches import Microbatches
from gt_autoparallel.problem.constraints import LayoutConstraint, ResolvedRequest

JsonObject = dict[str, Any]


def encode_plan(plan: PlacementPlan) -> JsonObject:
    """All of a plan but its prices, of which the digest is kept.

    Raises:
        PlacementInputError: what is given is no plan.
        UnsupportedModelError: an argument of a node is of a type that cannot be written down.
    """
    check_arguments("encode_plan", plan_problem(plan))
    return {
        "mesh": asdict(plan.mesh),
        "signature": {
            "parameters": dict(plan.signature.parameters),
            "modules": dict(plan.signature.modules),
            "graph_digest": plan.signature.graph_digest,
        },
        "prices_digest": plan.prices.digest,
        "request": _encode_request(plan.request),
        "graph": encode_graph(plan.graph),
        "options": [_encode_option(option) for option in plan.options],
        "recomputed": [plan.graph.nodes[index].name for index in plan.recomputed],
        "compute_us": list(plan.compute_us),
        "redistributions": [_encode_redistribution(each) for each in plan.redistributions],
        "windows": [asdict(window) for window in plan.windows],
        "memory": asdict(plan.memory),
        "solver": asdict(plan.solver),
        "replicated_nodes": list(plan.replicated_nodes),
        "judgement": None if plan.judgement is None else asdict(plan.judgement),
    }


def plan_digest(plan: PlacementPlan, *, renamed: Callable[[str], str] = str) -> str:
    """SHA-256 over what a plan decides, in hex: two plans of one digest place a model alike.

    What it would cost, what it was asked for and how it was found do not count.

    Args:
        plan: the plan.
        renamed: changes names in the text of which the digest is taken, so that plans of parts that
            are alike but for names have one digest.

    Raises:
        PlacementInputError: what is given is no plan.
    """
    check_arguments("plan_digest", plan_problem(plan))
    decided = {
        "mesh": asdict(plan.mesh),
        "graph": encode_graph(plan.graph),
        "options": [_encode_option(option) for option in plan.options],
        "recomputed": list(plan.recomputed),
        "steps": [
            [consumer, position, [asdict(step) for step in steps]]
            for (consumer, position), steps in sorted(plan.steps_of_uses().items())
        ],
    }
    return hashlib.sha256(renamed(canonical_json(decided).decode()).encode()).hexdigest()


def decode_plan(content: Mapping[str, Any], prices: StepPrices) -> PlacementPlan:
    """The plan that ``encode_plan`` wrote.

    Raises:
        PlanMismatchError: it cannot be read, or ``prices`` are not those of the plan.
        PlacementInputError: ``prices`` are none.
    """
    check_arguments("decode_plan", prices_problem(prices))
    try:
        plan, digest = _decode(content, prices), content["prices_digest"]
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, PlanMismatchError):
            raise
        raise PlanMismatchError(
            f"the plan's content cannot be read: {type(error).__name__}: {error}"
        ) from error
    if prices.digest != digest:
        raise PlanMismatchError(
            f"the plan was made with other prices: digest {digest!r}, those "
            f"given have {prices.digest!r}; give the cost model it was made with, or plan again"
        )
    return plan


def _decode(content: Mapping[str, Any], prices: StepPrices) -> PlacementPlan:
    mesh, graph = content["mesh"], decode_graph(content["graph"])
    index_of = {node.name: node.index for node in graph.nodes}
    return PlacementPlan(
        mesh=MeshShape(
            names=tuple(mesh["names"]),
            sizes=tuple(mesh["sizes"]),
            strides=tuple(mesh["strides"]),
        ),
        graph=graph,
        options=tuple(_decode_option(option) for option in content["options"]),
        recomputed=tuple(index_of[name] for name in content["recomputed"]),
        redistributions=tuple(
            _decode_redistribution(each, graph) for each in content["redistributions"]
        ),
        compute_us=tuple(float(time_us) for time_us in content["compute_us"]),
        windows=tuple(of_fields(PlannedWindow, window) for window in content["windows"]),
        memory=of_fields(MemoryBreakdown, content["memory"]),
        request=_decode_request(content["request"]),
        prices=prices,
        solver=of_fields(SolverReport, content["solver"]),
        signature=of_fields(ModelSignature, content["signature"]),
        replicated_nodes=tuple(content["replicated_nodes"]),
        judgement=_decode_judgement(content["judgement"]),
    )


def _encode_option(option: NodeOption) -> JsonObject:
    return {
        "operands": [encode_layout(layout) for layout in option.operands],
        "outputs": [encode_layout(layout) for layout in option.outputs],
        "by_rule": bool(option.axis_options),
    }


def _decode_option(content: Mapping[str, Any]) -> NodeOption:
    operands = tuple(_layout(text) for text in content["operands"])
    outputs = tuple(decode_layout(text) for text in content["outputs"])
    axis_options: tuple[AxisOption, ...] = ()
    if content["by_rule"]:
        layouts = [layout for layout in (*operands, *outputs) if layout is not None]
        axis_options = tuple(
            AxisOption(
                operands=tuple(layout[axis] for layout in operands),
                outputs=tuple(None if layout is None else layout[axis] for layout in outputs),
            )
            for axis in range(len(layouts[0]))
        )
    return NodeOption(operands=operands, outputs=outputs, axis_options=axis_options)


def _encode_redistribution(redistribution: PlannedRedistribution) -> JsonObject:
    use = redistribution.use
    return {
        "consumer": use.consumer,
        "position": use.position,
        "steps": [asdict(step) for step in redistribution.steps],
        "in_full_us": redistribution.in_full_us,
        "hidden_us": redistribution.hidden_us,
        "window": redistribution.window,
        "again": redistribution.again,
    }


def _decode_redistribution(
    content: Mapping[str, Any], graph: PlacementGraph
) -> PlannedRedistribution:
    consumer, position = content["consumer"], content["position"]
    value = graph.nodes[consumer].operands[position]
    return PlannedRedistribution(
        use=Use(value=value, consumer=consumer, position=position),
        steps=tuple(_decode_step(step) for step in content["steps"]),
        in_full_us=content["in_full_us"],
        hidden_us=content["hidden_us"],
        window=content["window"],
        again=content["again"],
    )


def _decode_step(content: Mapping[str, Any]) -> RedistributionStep:
    if content["kind"] not in get_args(StepKind):
        raise PlanMismatchError(f"a step is of kind {content['kind']!r}; allowed: {StepKind!r}")
    shapes = {name: tuple(content[name]) for name in ("input_shape", "output_shape")}
    return RedistributionStep(**{**content, **shapes})


def _encode_request(request: ResolvedRequest) -> JsonObject:
    constraints = [
        {
            **asdict(constraint),
            "placements": [
                None if placement is None else encode_layout((placement,))
                for placement in constraint.placements
            ],
        }
        for constraint in request.constraints
    ]
    return {**asdict(request), "constraints": constraints}


def _decode_request(content: Mapping[str, Any]) -> ResolvedRequest:
    constraints = []
    for each in content["constraints"]:
        placements = (None if text is None else _layout(text)[0] for text in each["placements"])
        constraints.append(LayoutConstraint(**{**each, "placements": tuple(placements)}))
    microbatches = content["microbatches"]
    return of_fields(
        ResolvedRequest,
        {
            **content,
            "constraints": tuple(constraints),
            "replicate_unknown": tuple(content["replicate_unknown"]),
            "microbatches": None if microbatches is None else of_fields(Microbatches, microbatches),
        },
    )


def _decode_judgement(content: Mapping[str, Any] | None) -> PlanJudgement | None:
    if content is None:
        return None
    candidates = tuple(
        of_fields(
            Candidate,
            {**each, "step": None if each["step"] is None else of_fields(JudgedStep, each["step"])},
        )
        for each in content["candidates"]
    )
    return of_fields(PlanJudgement, {"chosen": content["chosen"], "candidates": candidates})


def _layout(text: str | None) -> Layout:
    layout = decode_layout(text)
    if layout is None:
        raise PlanMismatchError("a layout is missing where there is a tensor")
    return layout


# Dataclasses from the JSON values of their fields, each of the kind that its annotation says.
#
# What a plan is compared with, added up or printed as has to be a number or a name, whoever
# wrote the file. Only plain kinds are looked at, and mappings; what is made of other dataclasses
# is not.
_T = TypeVar("_T")
_PLAIN = (bool, int, float, str, NoneType, Mapping)


def of_fields(kind: type[_T], content: Mapping[str, Any]) -> _T:
    """The dataclass ``kind`` with the fields in ``content``.

    Raises:
        PlanMismatchError: a value is of another kind than its field; names every such field.
        TypeError: there are other fields, or too few.
    """
    of_class: Any = kind
    kinds = _plain_kinds(of_class)
    problems = [
        f"{name} is {value!r}; allowed: {' or '.join(each.__name__ for each in kinds[name])}"
        for name, value in content.items()
        if name in kinds and not any(_is_of(value, each) for each in kinds[name])
    ]
    if problems:
        raise PlanMismatchError(f"{kind.__name__}: {'; '.join(problems)}")
    return kind(**content)


@functools.cache
def _plain_kinds(kind: type) -> dict[str, tuple[type, ...]]:
    """For each field that may only be of plain kinds: these."""
    found = {}
    for name, hint in get_type_hints(kind).items():
        origin = get_origin(hint)
        kinds = (origin,) if origin is Mapping else get_args(hint) or (hint,)
        if all(each in _PLAIN for each in kinds):
            found[name] = kinds
    return found


def _is_of(value: object, kind: type) -> bool:
    """JSON writes whole numbers of floats without a point, and truth is no number."""
    if kind is Mapping:
        return isinstance(value, dict)
    return type(value) is kind or (kind is float and type(value) is int)
