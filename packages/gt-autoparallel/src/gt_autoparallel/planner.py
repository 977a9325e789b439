"""From a captured graph to an audited plan, as often as one asks.

A planner keeps what does not change from one request to the next: the graph, the options of its
nodes, prices and tables of redistributions, and the last solution as a place to begin. So asking
again with another budget or other constraints costs little more than the solve.
"""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

from gt_autoparallel.audit import audit_plan
from gt_autoparallel.errors import ConstraintError, PlacementInputError
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode
from gt_autoparallel.plan.placement_plan import ModelSignature, PlacementPlan, SolverReport
from gt_autoparallel.plan.plan_assembly import assemble_plan
from gt_autoparallel.prices.costs import PlacementPrices, StepPrices
from gt_autoparallel.problem.clustering import Clustering
from gt_autoparallel.problem.constraints import (
    Constraints,
    LayoutConstraint,
    ResolvedRequest,
    placements_text,
    resolve_constraints,
)
from gt_autoparallel.problem.expert_rivals import ExpertPins, expert_pins, expert_rivals
from gt_autoparallel.problem.infeasible_requests import explained
from gt_autoparallel.problem.problem_of_graph import (
    PlacementProblem,
    ProblemParts,
    placement_problem,
)
from gt_autoparallel.problem.redistribution_tables import RedistributionTables
from gt_autoparallel.request_checks import check_request
from gt_autoparallel.rules import check_operators, node_options, uncut_attention
from gt_autoparallel.solver import (
    ForbiddenPairsError,
    MemoryBudgetError,
    Solution,
    WarmStart,
    solve,
)

ReportProgress = Callable[[str], None]
"""Takes one line about what is being done."""

_GIB = 2**30


class Planner:
    """Plans one graph on one mesh.

    Args:
        graph: what is placed.
        mesh: names and sizes of the axes.
        signature: of the model that the graph was captured from.
        prices: of nodes and steps; the roofline and NCCL on H100s by default.
        replicate_unknown: operators that may run whole on every rank without a rule.
        optimizer_state_copies: in units of the parameters' bytes: 2 for Adam.
        progress: told what is being done.

    Raises:
        UnsupportedOperatorError: operators have no rule; all of them are named.
        PlacementInputError: an axis of the mesh can shard nothing.
    """

    def __init__(
        self,
        graph: PlacementGraph,
        mesh: MeshShape,
        *,
        signature: ModelSignature,
        prices: StepPrices | None = None,
        replicate_unknown: Collection[str] = (),
        optimizer_state_copies: float = 2.0,
        progress: ReportProgress | None = None,
    ) -> None:
        check_operators(graph, replicate_unknown=replicate_unknown)
        _check_mesh(graph, mesh)
        for line in uncut_attention(graph):
            warnings.warn(line, stacklevel=2)
        self.graph = graph
        self.mesh = mesh
        self.signature = signature
        self.prices = PlacementPrices() if prices is None else prices
        self.replicate_unknown = tuple(sorted(replicate_unknown))
        self._optimizer_state_copies = optimizer_state_copies
        self._say = progress or (lambda line: None)
        self._tables = RedistributionTables(mesh, self.prices)
        self._parts: dict[Clustering, ProblemParts] = {}
        self._warm_starts: dict[object, WarmStart] = {}
        self._expert_pins: ExpertPins | None = None

    def find(
        self,
        *,
        constraints: Constraints | Sequence[LayoutConstraint] = (),
        memory_budget_bytes: int | None = None,
        relative_gap: float = 0.0,
        time_limit_seconds: float = 120.0,
        audit: bool = True,
    ) -> PlacementPlan:
        """The cheapest placement that keeps constraints and budget.

        Of equally cheap ones it is one that takes little memory. Whatever the gap, what experts
        would do (``expert_plans``) under the same constraints and budget costs no less, unless the
        time limit ends the proof of that too.

        Args:
            constraints: by names and patterns, or already those of single nodes.
            memory_budget_bytes: on each rank; None for no limit.
            relative_gap: the plan may cost more than the best one by this.
            time_limit_seconds: for the solver; then the best plan yet is given with its gap.
            audit: whether to work the plan out a second time, see ``audit_plan``.

        Raises:
            PlacementInputError: an argument is not what it must be; lists every violation.
            ConstraintError: a constraint names what does not exist or asks for what no option is.
            InfeasiblePlacementError: nothing keeps constraints and budget; says which and by how
                much.
            SolverError: no plan was found in time.
            AuditError: the plan is not what the solver said: a bug of ours.
        """
        check_request(
            constraints=constraints,
            memory_budget_bytes=memory_budget_bytes,
            relative_gap=relative_gap,
            time_limit_seconds=time_limit_seconds,
        )
        if isinstance(constraints, Constraints):
            resolved = resolve_constraints(constraints, self.graph, self.mesh)
        else:
            resolved = tuple(constraints)
        request = ResolvedRequest(
            constraints=resolved,
            memory_budget_bytes=memory_budget_bytes,
            optimizer_state_copies=self._optimizer_state_copies,
            replicate_unknown=self.replicate_unknown,
        )
        started = time.perf_counter()
        placement = self.problem(request)
        self._say(
            f"{len(self.graph.nodes)} nodes, {len(placement.problem.variables)} choices, "
            f"{sum(map(len, placement.choices))} options, {len(placement.problem.edges)} edges "
            f"({time.perf_counter() - started:.1f} s)"
        )
        solution = self._solve(placement, request, relative_gap, time_limit_seconds)
        plan = assemble_plan(
            graph=self.graph,
            mesh=self.mesh,
            options=placement.options_of_nodes(solution.choices),
            prices=self.prices,
            request=request,
            signature=self.signature,
            solver=_solver_report(placement, solution),
        )
        if audit:
            self._say(str(audit_plan(plan)))
        return plan

    def problem(self, request: ResolvedRequest) -> PlacementProblem:
        """The optimization problem of a request."""
        found = placement_problem(
            self.graph,
            self.mesh,
            self._options_of,
            self.prices,
            memory_budget_bytes=request.memory_budget_bytes,
            optimizer_state_copies=request.optimizer_state_copies,
            constraints=request.constraints,
            tables=self._tables,
            parts=self._parts,
        )
        self._check_constraints(found, request)
        return found

    def _options_of(self, node: PlacementNode) -> tuple[NodeOption, ...]:
        operands = self.graph.operand_specs(node)
        return node_options(node, operands, self.mesh, replicate_unknown=self.replicate_unknown)

    def _check_constraints(self, placement: PlacementProblem, request: ResolvedRequest) -> None:
        constraints_of: dict[str, list[LayoutConstraint]] = defaultdict(list)
        for each in request.constraints:
            constraints_of[each.node].append(each)
        known = {node.name for node in self.graph.nodes}
        problems = [
            f"there is no node {each.node!r}"
            for each in request.constraints
            if each.node not in known
        ]
        problems += [
            f"node {variable.name!r} has no option with "
            + " and ".join(
                f"{each.side} {each.position} in {placements_text(each.placements)}"
                for each in constraints_of[variable.name]
            )
            for variable in placement.problem.variables
            if variable.name in constraints_of and not (variable.cost_us < float("inf")).any()
        ]
        if problems:
            raise ConstraintError("constraints:\n  " + "\n  ".join(problems))

    def _solve(
        self,
        placement: PlacementProblem,
        request: ResolvedRequest,
        relative_gap: float,
        time_limit_seconds: float,
    ) -> Solution:
        shape = tuple(map(len, placement.choices))
        if self._expert_pins is None:
            self._expert_pins = expert_pins(
                self.graph, self.mesh, replicate_unknown=self.replicate_unknown
            )
        try:
            solution = solve(
                placement.problem,
                relative_gap=relative_gap,
                time_limit_seconds=time_limit_seconds,
                progress=lambda progress: self._say(str(progress)),
                warm_start=self._warm_starts.get(shape),
                rivals=expert_rivals(placement, self._expert_pins),
            )
        except (ForbiddenPairsError, MemoryBudgetError) as error:
            raise explained(error, placement, request, self.mesh) from error
        self._warm_starts[shape] = solution.warm_start
        return solution


def _solver_report(placement: PlacementProblem, solution: Solution) -> SolverReport:
    prices = solution.memory_prices
    return SolverReport(
        objective_us=solution.objective_us,
        lower_bound_us=solution.lower_bound_us,
        method=solution.method,
        seconds=solution.seconds["total"],
        num_variables=len(placement.problem.variables),
        num_options=sum(map(len, placement.choices)),
        num_nodes=len(placement.graph.nodes),
        memory_price_us_per_gib=abs(prices[0]) * _GIB if prices else 0.0,
        proven=solution.proven,
    )


def _check_mesh(graph: PlacementGraph, mesh: MeshShape) -> None:
    """Each axis must divide some dim of some parameter or input."""
    shapes = {
        spec.shape
        for node in graph.nodes
        if node.kind in ("parameter", "input")
        for spec in node.outputs
        if spec is not None
    }
    problems = [
        f"axis {name!r} has {size} ranks, and no dim of any parameter or input is a multiple of "
        f"{size}: nothing could be sharded along it"
        for name, size in zip(mesh.names, mesh.sizes, strict=True)
        if not any(extent and extent % size == 0 for shape in shapes for extent in shape)
    ]
    if problems:
        raise PlacementInputError("mesh: " + "; ".join(problems))
