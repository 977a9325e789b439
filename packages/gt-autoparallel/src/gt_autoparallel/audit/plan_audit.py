"""The audit of a plan: everything it says is worked out again, by code that planned nothing.

A solver sees tables and clusters of a graph. A wrong table, a cluster whose members differ or an
edge left out gives a plan that costs something else than its objective, with nothing in the result
to show it. So the plan is walked on the whole graph, node by node and use by use: is every option
one that the node has, do the steps of every redistribution lead where they should, does every
price, window, sum and byte come out the same?

Independent of the planner: layouts of shards, the walk of steps, windows, sums and memory are
programmed a second time here. Shared with it: the options of a single operator, and the price of a
single node and step.
"""

from __future__ import annotations

from dataclasses import dataclass

from gt_autoparallel.argument_checks import check_arguments
from gt_autoparallel.audit.cost_checks import CostWalk
from gt_autoparallel.audit.memory_checks import memory_problems
from gt_autoparallel.audit.node_checks import (
    OfferedOptions,
    constraint_problems,
    link_problems,
    node_problems,
    replicated_problems,
)
from gt_autoparallel.audit.recomputation_checks import recomputation_problems
from gt_autoparallel.errors import AuditError
from gt_autoparallel.graph.graph_encoding import graph_digest
from gt_autoparallel.plan.placement_plan import PlacementPlan, plan_problem
from gt_autoparallel.prices.memory import MemoryBreakdown
from gt_autoparallel.rules import node_options

_MAX_LISTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What an audit that found nothing wrong has seen."""

    total_us: float
    """The plan's cost by the audit's own walk."""

    objective_us: float
    """The plan's cost as the solver had it."""

    memory: MemoryBreakdown
    num_nodes: int
    num_redistributions: int
    num_steps: int

    @property
    def relative_error(self) -> float:
        """How far the solver's objective is off, relative to the audited cost."""
        return abs(self.objective_us - self.total_us) / self.total_us if self.total_us else 0.0

    def __str__(self) -> str:
        return (
            f"audited {self.num_nodes} nodes, {self.num_redistributions} redistributions, "
            f"{self.num_steps} steps: {self.total_us:.3f} us, off by {self.relative_error:.1e}"
        )


def audit_plan(plan: PlacementPlan, *, offered: OfferedOptions | None = None) -> AuditReport:
    """Work a plan out again on its whole graph.

    Args:
        plan: the plan.
        offered: the options of operators; those of this package's rules by default.

    Returns:
        What was seen, if everything agrees.

    Raises:
        AuditError: something does not; the message lists every disagreement.
        PlacementInputError: what is given is no plan.
    """
    check_arguments("audit_plan", plan_problem(plan))
    problems, walk = examined(plan, offered)
    if walk is None or problems:
        lines = "".join(f"\n  - {problem}" for problem in problems[:_MAX_LISTED])
        more = len(problems) - _MAX_LISTED
        if more > 0:
            lines += f"\n  - and {more} more"
        raise AuditError(f"the plan is not what it says:{lines}")
    return AuditReport(
        total_us=walk.total_us,
        objective_us=plan.solver.objective_us,
        memory=plan.memory,  # all parts of which were counted again
        num_nodes=len(plan.graph.nodes),
        num_redistributions=walk.num_redistributions,
        num_steps=walk.num_steps,
    )


def examined(
    plan: PlacementPlan, offered: OfferedOptions | None
) -> tuple[list[str], CostWalk | None]:
    """A line for everything that is wrong, and the walk, if what is walked means anything."""
    problems = []
    if graph_digest(plan.graph) != plan.signature.graph_digest:
        problems.append("the graph is not the one that the plan was made for")
    if len(plan.options) != len(plan.graph.nodes):
        return [*problems, f"{len(plan.options)} options for {len(plan.graph.nodes)} nodes"], None
    problems += node_problems(plan, offered or node_options)
    problems += recomputation_problems(plan)
    if problems:
        # Costs of what a node cannot do mean nothing.
        return problems, None
    problems += link_problems(plan)
    problems += constraint_problems(plan)
    problems += replicated_problems(plan)
    walk = CostWalk(plan)
    problems += walk.problems
    problems += memory_problems(plan)
    return problems, walk
