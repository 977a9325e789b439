"""Plans of several parts of a model, as of a pipeline's stages: alike parts are searched for once.

Two parts are alike if what was captured of them differs in the names of layers only, and the same
is asked of both. Then the plan of one is that of the other: its options are put on the other's own
graph, and audited there as any plan is.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gt_autoparallel.audit import audit_plan
from gt_autoparallel.find import PlacementRequest, find_with, planner_for, warn_if_open
from gt_autoparallel.graph.graph_encoding import canonical_json, encode_graph
from gt_autoparallel.graph.layer_names import layer_of_module
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.placement_graph import PlacementGraph
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.plan.plan_assembly import assemble_plan
from gt_autoparallel.planner import Planner

Key = TypeVar("Key", bound=Hashable)
"""Names a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartToPlace:
    """What ``find_placement`` takes, but the mesh."""

    model: nn.Module
    example_inputs: Sequence[Any]
    example_kwargs: Mapping[str, Any] | None = None
    request: PlacementRequest


def find_placements(
    parts: Mapping[Key, PartToPlace], mesh: DeviceMesh | MeshShape
) -> dict[Key, PlacementPlan]:
    """Find the cheapest placement of each part; alike ones get the same.

    Args:
        parts: by whatever names them.
        mesh: on which each of them runs.

    Warns:
        OpenSearchWarning: as ``find_placement``, once all parts have plans; names the part.

    Raises:
        PlacementError: as ``find_placement``, with a note that names the part.
    """
    known: dict[Hashable, PlacementPlan] = {}
    plans: dict[Key, PlacementPlan] = {}
    for key, part in parts.items():
        try:
            planner = planner_for(
                part.model, mesh, part.example_inputs, part.request, part.example_kwargs
            )
            asked = _description(planner, part.request)
            if asked in known:
                plans[key] = _moved(known[asked], planner, part.request)
            else:
                plans[key] = known[asked] = find_with(planner, part.request)
        except Exception as error:
            error.add_note(f"while {key} was planned")
            raise
    for key, plan in plans.items():
        if any(plan is each for each in known.values()):  # alike parts are told once
            warn_if_open(plan, parts[key].request.relative_gap, of=f"a placement of part {key}")
    return plans


def _description(planner: Planner, request: PlacementRequest) -> Hashable:
    """What alike parts have in common: the graph without names of layers, and what is asked."""
    index_of = {node.name: node.index for node in planner.graph.nodes}
    demands = tuple(
        (index_of.get(each.node), each.side, each.position, each.placements)
        for each in planner.resolved(request.constraints)
    )
    # Cost models are compared by what they say: each request may have its own.
    rest = replace(
        request,
        constraints=(),
        experts=None,
        progress=None,
        replicate_unknown=(),
        cost_model=None,
    )
    graph, prices = _without_layers(planner.graph), planner.prices.digest
    return (graph, demands, rest, prices, planner.replicate_unknown)


def _without_layers(graph: PlacementGraph) -> str:
    """All of a graph as text, with layers numbered as they appear."""
    names = (layer_of_module(node.module) for node in graph.nodes)
    layers = {name: number for number, name in enumerate(dict.fromkeys(filter(None, names)))}
    text = canonical_json(encode_graph(graph)).decode()
    if not layers:
        return text
    pattern = '"(' + "|".join(map(re.escape, layers)) + r")(?=[./\" ])"
    return re.sub(pattern, lambda match: f'"layer {layers[match[1]]}', text)


def _moved(plan: PlacementPlan, planner: Planner, request: PlacementRequest) -> PlacementPlan:
    """The plan of an alike part, for the graph of ``planner``."""
    moved = assemble_plan(
        graph=planner.graph,
        mesh=planner.mesh,
        options=plan.options,
        recomputed=plan.recomputed,
        prices=planner.prices,
        request=replace(plan.request, constraints=planner.resolved(request.constraints)),
        signature=planner.signature,
        solver=plan.solver,
    )
    audit_plan(moved)
    return moved
