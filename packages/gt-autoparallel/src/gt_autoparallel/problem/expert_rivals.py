"""What experts do, as rivals that the solver must not lose to whatever gap it is allowed.

An expert's plan (``axis_styles``) is a part of the problem: of each variable those options that
lie where the expert pins its first node. The solver looks in that part for what is cheaper than its
own choice (``solver.rivals``). Where a request pins what the expert does, the part is the whole
problem: to look there would be to look for the optimum, whatever gap was asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import numpy as np

from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.placement_graph import PlacementGraph
from gt_autoparallel.problem.axis_styles import (
    PinnedPlaces,
    expert_styles,
    pinned_constraints,
)
from gt_autoparallel.problem.constraints import LayoutConstraint
from gt_autoparallel.problem.problem_of_graph import Demand, PlacementProblem, is_allowed
from gt_autoparallel.solver import Rival

ExpertPins = tuple[tuple[LayoutConstraint, ...], ...]
"""What each expert pins."""


def expert_pins(
    graph: PlacementGraph, mesh: MeshShape, *, replicate_unknown: Collection[str] = ()
) -> ExpertPins:
    """What the experts whose plans are known for ``mesh`` would pin in ``graph``."""
    has_experts = bool(graph.of_kind("experts"))
    places = PinnedPlaces(graph)
    return tuple(
        pinned_constraints(graph, mesh, styles, replicate_unknown=replicate_unknown, places=places)
        for styles in expert_styles(mesh, routed_experts=has_experts).values()
    )


def expert_rivals(placement: PlacementProblem, pins: ExpertPins) -> list[Rival]:
    """For each expert the options that its plans may take, of the variables of a problem.

    An expert that may take all that the problem allows is no rival.
    """
    allowed = [np.isfinite(variable.cost_us) for variable in placement.problem.variables]
    rivals = [_rival(placement, each) for each in pins]
    return [
        rival
        for rival in rivals
        if any((there & ~of_rival).any() for there, of_rival in zip(allowed, rival, strict=True))
    ]


def _rival(placement: PlacementProblem, pins: Sequence[LayoutConstraint]) -> Rival:
    demands: dict[str, list[Demand]] = defaultdict(list)
    for pin in pins:
        demands[pin.node].append((pin.side, pin.position, pin.placements))
    return [
        np.array([is_allowed(choice.option, demands[variable.name]) for choice in choices])
        for variable, choices in zip(placement.problem.variables, placement.choices, strict=True)
    ]
