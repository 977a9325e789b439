"""What stands in the way of any plan, in terms of what was asked for."""

from __future__ import annotations

import math

from gt_autoparallel.errors import InfeasiblePlacementError
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.prices.memory import MemoryBreakdown
from gt_autoparallel.problem.constraints import ResolvedRequest, placements_text
from gt_autoparallel.problem.problem_of_graph import PlacementProblem
from gt_autoparallel.problem.requested_memory import requested_memory
from gt_autoparallel.solver import ForbiddenPairsError, MemoryBudgetError

_GIB = 2**30


def explained(
    error: ForbiddenPairsError | MemoryBudgetError,
    placement: PlacementProblem,
    request: ResolvedRequest,
    mesh: MeshShape,
) -> InfeasiblePlacementError:
    """The solver's error about ``placement`` in words of constraints and bytes."""
    if isinstance(error, ForbiddenPairsError):
        return InfeasiblePlacementError(_conflict(error, placement, request))
    return InfeasiblePlacementError(_shortage(error, placement, request, mesh))


def _conflict(
    error: ForbiddenPairsError, placement: PlacementProblem, request: ResolvedRequest
) -> str:
    members = placement.clustering.members
    names = {
        placement.graph.nodes[node].name
        for variable in error.variables
        for node in members[variable]
    }
    involved = [each for each in request.constraints if each.node in names]
    lines = [
        f"{each.side} {each.position} of {each.node!r} in {placements_text(each.placements)}"
        for each in involved
    ]
    if not lines:
        return f"no placement exists: {error}"
    return (
        "constraints contradict each other; no placement has all of\n  "
        + "\n  ".join(lines)
        + f"\nsince {error}"
    )


def _shortage(
    error: MemoryBudgetError,
    placement: PlacementProblem,
    request: ResolvedRequest,
    mesh: MeshShape,
) -> str:
    def taken_by(choices: tuple[int, ...]) -> MemoryBreakdown:
        options = placement.options_of_nodes(choices)
        recomputed = placement.recomputed_nodes(choices)
        return requested_memory(placement.graph, options, mesh, request, recomputed=recomputed)

    frugal = dict.fromkeys((error.frugal, *(each.choices for each in error.shortages)))
    smallest = min(map(taken_by, frugal), key=lambda memory: memory.total)
    # Rows are of several moments: a plan has to keep all of them.
    shortage = max(error.shortages, key=lambda each: each.minimum_bytes)
    budget, least = shortage.budget_bytes, shortage.minimum_bytes
    too_small = f"the memory budget of {_size(budget)} a rank is too small"
    if error.jointly and smallest.total <= budget:
        said = (
            f"no placement was found that keeps the memory budget of {_size(budget)} a rank, as "
            "the search counts a little more than plans take where kinds of layers alternate; "
            f"one takes {_size(smallest.total)}"
        )
    elif error.jointly:
        said = (
            f"{too_small}: placements keep it at each moment of a step, and none was found that "
            f"keeps it at all of them; one takes {_size(smallest.total)}"
        )
    else:
        taken = "" if smallest.total <= least else f"; one takes {_size(smallest.total)}"
        said = (
            f"{too_small} by {_size(least - budget)}: no placement takes less than "
            f"{_size(least)}{taken}"
        )
    return f"{said}, of which\n{_table(smallest)}\n{_advice(smallest, budget, request)}"


def _advice(memory: MemoryBreakdown, budget: float, request: ResolvedRequest) -> str:
    """What would help."""
    state = memory.parameters + memory.gradients + memory.optimizer_state
    if state > budget:
        return (
            f"parameters, gradients and optimizer state alone take {_size(state)}: more ranks, "
            "parameters of fewer bytes or an optimizer with less state would help"
        )
    if not request.recomputes:
        return "recomputes=True would let the backward compute again what it does not keep"
    return "more ranks, or smaller or shorter batches would help"


def _table(memory: MemoryBreakdown) -> str:
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])
    total = max(memory.total, 1)
    return "\n".join(
        f"  {name:<18}{_size(num_bytes):>18}  {num_bytes / total:>6.1%}"
        for name, num_bytes in parts
    )


def _size(num_bytes: float) -> str:
    """Bytes as text: in GiB, or in bytes where they are too few for that."""
    if num_bytes < _GIB / 10:
        return f"{math.ceil(num_bytes):,} bytes"
    return f"{num_bytes / _GIB:.3f} GiB"
