"""From a captured graph to an audited plan, as often as one asks.

A planner keeps what does not change from one request to the next: the graph, the options of its
nodes, prices and tables of redistributions, and the last solution as a place to begin. So asking
again with another budget or other constraints costs little more than the solve.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace

from gt_autoparallel.audit import audit_plan
from gt_autoparallel.errors import (
    ConstraintError,
    DearPlacementError,
    InfeasiblePlacementError,
    OutOfTimeError,
    SolverError,
)
from gt_autoparallel.found_placement import (
    FoundPlacement,
    cheaper_of,
    found_placement,
    is_proven,
)
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode
from gt_autoparallel.plan.placement_plan import ModelSignature, PlacementPlan
from gt_autoparallel.plan.plan_assembly import assemble_plan
from gt_autoparallel.prices.costs import PlacementPrices, StepPrices
from gt_autoparallel.prices.microbatches import Microbatches
from gt_autoparallel.problem.constraints import (
    Constraints,
    LayoutConstraint,
    ResolvedRequest,
    placements_text,
    resolve_constraints,
)
from gt_autoparallel.problem.expert_rivals import ExpertPins, expert_pins, expert_rivals
from gt_autoparallel.problem.infeasible_requests import explained
from gt_autoparallel.problem.problem_of_graph import PlacementProblem, placement_problem
from gt_autoparallel.problem.problem_parts import PartsKey, ProblemParts
from gt_autoparallel.problem.recomputed_choices import (
    recomputing,
)
from gt_autoparallel.problem.redistribution_tables import RedistributionTables
from gt_autoparallel.request_checks import check_mesh_of_graph, check_request
from gt_autoparallel.rules import check_operators, node_options, uncut_attention
from gt_autoparallel.rules.experts import expert_options
from gt_autoparallel.solver import (
    ForbiddenPairsError,
    MemoryBudgetError,
    Solution,
    WarmStart,
    solve,
    solve_mixed,
)
from gt_autoparallel.solver.problem import FloatArray
from gt_trace.garbage_collection import held_garbage_collection

ReportProgress = Callable[[str], None]
"""Takes one line about what is being done."""

_GIB = 2**30
_LEAST_SHARE = 0.1
"""Of the time limit: what a search under a budget has at least, however long one without took."""

_ALIKE_PARTS = 16
"""Of a problem: so many are looked at for layers that do the same where a mixture is not proven."""

_COUNTED = "layers counted by what they do"
"""How a mixture was found."""


class Planner:
    """Plans one graph on one mesh.

    Args:
        graph: what is placed.
        mesh: names and sizes of the axes.
        signature: of the model that the graph was captured from.
        prices: of nodes and steps; the roofline and NCCL on H100s by default.
        replicate_unknown: operators that may run whole on every rank without a rule.
        optimizer_state_copies: in units of the parameters' bytes: 2 for Adam.
        microbatches: how a step runs the graph for several microbatches; ``prices`` must be those
            of so many. None: the graph is the step.
        loss_bytes: as in ``PlacementRequest``.
        accumulates_gradients: likewise.
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
        microbatches: Microbatches | None = None,
        loss_bytes: int = 0,
        accumulates_gradients: bool = False,
        progress: ReportProgress | None = None,
    ) -> None:
        check_operators(graph, replicate_unknown=replicate_unknown)
        check_mesh_of_graph(graph, mesh)
        for line in uncut_attention(graph):
            warnings.warn(line, stacklevel=2)
        self.graph = graph
        self.mesh = mesh
        self.signature = signature
        self.prices = PlacementPrices() if prices is None else prices
        self.replicate_unknown = tuple(sorted(replicate_unknown))
        self._optimizer_state_copies = optimizer_state_copies
        self._microbatches = microbatches
        self._loss_bytes = loss_bytes
        self._accumulates_gradients = accumulates_gradients
        self._say = progress or (lambda line: None)
        self._tables = RedistributionTables(mesh, self.prices)
        self._times: dict[int, FloatArray] = {}
        self._parts: dict[PartsKey, ProblemParts] = {}
        self._warm_starts: dict[object, WarmStart] = {}
        self._unlimited: dict[tuple[ResolvedRequest, float], FoundPlacement] = {}
        """What was found without a budget, by request and gap."""
        self._expert_pins: ExpertPins | None = None

    @held_garbage_collection()
    def find(
        self,
        *,
        constraints: Constraints | Sequence[LayoutConstraint] = (),
        memory_budget_bytes: int | None = None,
        recomputes: bool = True,
        relative_gap: float = 0.0,
        time_limit_seconds: float = 120.0,
        below_us: float = math.inf,
        audit: bool = True,
    ) -> PlacementPlan:
        """The cheapest placement that keeps constraints and budget.

        Of equally cheap ones it is one that takes little memory. Whatever the gap, what experts
        would do (``expert_plans``) under the same constraints and budget costs no less, unless the
        time limit ends the proof of that too. Of layers that are counted by what they do (a gap is
        allowed, and a budget binds) this holds for what is found of experts without branching. An
        expert whose plans are all that the constraints allow is the problem itself: of it the gap
        holds.

        Args:
            constraints: by names and patterns, or already those of single nodes.
            memory_budget_bytes: on each rank; None for no limit.
            recomputes: whether nodes of the forward may run again in the backward to keep the
                budget: gatherings of parameters too.
            relative_gap: the plan may cost more than the best one by this.
            time_limit_seconds: for the solver; then the best plan yet is given with its gap.
            below_us: the search ends where it is known that every plan costs this or more. A plan
                that is found may cost more all the same.
            audit: whether to work the plan out a second time, see ``audit_plan``.

        Raises:
            PlacementInputError: an argument is not what it must be; lists every violation.
            ConstraintError: a constraint names what does not exist or asks for what no option is.
            InfeasiblePlacementError: nothing keeps constraints and budget; says which and by how
                much.
            SolverError: no plan was found in time, or every plan is too dear.
            AuditError: the plan is not what the solver said: a bug of ours.
        """
        check_request(
            constraints=constraints,
            memory_budget_bytes=memory_budget_bytes,
            recomputes=recomputes,
            relative_gap=relative_gap,
            time_limit_seconds=time_limit_seconds,
            below_us=below_us,
        )
        request = ResolvedRequest(
            constraints=self.resolved(constraints),
            memory_budget_bytes=memory_budget_bytes,
            recomputes=recomputes,
            optimizer_state_copies=self._optimizer_state_copies,
            replicate_unknown=self.replicate_unknown,
            microbatches=self._microbatches,
            loss_bytes=self._loss_bytes,
            accumulates_gradients=self._accumulates_gradients,
        )
        try:
            found = self._cheapest(request, relative_gap, time_limit_seconds, below_us)
        except OutOfTimeError as error:  # of a search that had a part of the time
            raise OutOfTimeError(time_limit_seconds) from error
        plan = assemble_plan(
            graph=self.graph,
            mesh=self.mesh,
            options=found.options,
            recomputed=found.recomputed,
            prices=self.prices,
            request=request,
            signature=self.signature,
            solver=found.report,
            memory=found.memory,
        )
        if audit:
            self._say(str(audit_plan(plan)))
        return plan

    def resolved(
        self, constraints: Constraints | Sequence[LayoutConstraint]
    ) -> tuple[LayoutConstraint, ...]:
        """Constraints as those of single nodes of the graph.

        Raises:
            ConstraintError: they name what does not exist, or do not fit it.
        """
        if isinstance(constraints, Constraints):
            return resolve_constraints(constraints, self.graph, self.mesh)
        return tuple(constraints)

    def _cheapest(
        self,
        request: ResolvedRequest,
        relative_gap: float,
        time_limit_seconds: float,
        below_us: float,
    ) -> FoundPlacement:
        """The cheapest placement; of a request with a budget first that without it.

        What keeps the budget without running anything again is the cheapest then, too. What does
        not is a place to begin.
        """
        budget = request.memory_budget_bytes
        started = time.perf_counter()
        unlimited = replace(request, memory_budget_bytes=None, recomputes=False)
        free = self._unlimited.get((unlimited, relative_gap))
        if free is None:
            free = self._solved(
                self.problem(unlimited), unlimited, relative_gap, time_limit_seconds, below_us
            )
            if free.report.proven:  # more time would find no other
                self._unlimited[unlimited, relative_gap] = free
        if free.report.lower_bound_us >= below_us:  # of an earlier request
            raise DearPlacementError(free.report.lower_bound_us, below_us)
        if budget is None:
            return free
        if free.memory.total <= budget:
            return free
        least = _LEAST_SHARE * time_limit_seconds
        ends = max(started + time_limit_seconds, time.perf_counter() + least)

        def within(ends: float, *, all_moments: bool) -> FoundPlacement:
            placement = self.problem(request, all_moments=all_moments)
            if request.recomputes and relative_gap > 0:
                mixed = self._mixed(placement, request, relative_gap, ends, free.options, below_us)
                if mixed is not None:
                    return self._or_alike(mixed, request, relative_gap, ends, below_us)
            left = max(ends - time.perf_counter(), least)
            return self._solved(placement, request, relative_gap, left, below_us, free.options)

        # Several times the rows of memory are for those plans that would break them.
        memory, at_reduction = free.memory, sum(free.memory.at_reduction.values())
        if relative_gap > 0 and at_reduction < memory.total and not memory.let_go_in_backward:
            halfway = (time.perf_counter() + ends) / 2
            with suppress(OutOfTimeError):  # what is left may be enough for all rows
                found = within(halfway, all_moments=False)
                if found.memory.total <= budget:
                    return found
        return within(ends, all_moments=True)

    def _mixed(
        self,
        placement: PlacementProblem,
        request: ResolvedRequest,
        relative_gap: float,
        ends: float,
        near: Sequence[NodeOption],
        below_us: float,
    ) -> FoundPlacement | None:
        """A placement of which alike layers may place and recompute differently.

        ``near`` are options of nodes that are nearly right, ``ends`` is on the clock of
        ``time.perf_counter``. None if none was found.
        """
        self._say_size(placement)
        found = solve_mixed(
            placement.problem,
            relative_gap=relative_gap,
            time_limit_seconds=ends - time.perf_counter(),
            warm_start=self._start(placement, near, relative_gap, ends - time.perf_counter()),
            rivals=expert_rivals(placement, self._pins()),
            progress=lambda progress: self._say(str(progress)),
            below_us=below_us,
        )
        if below_us <= found.lower_bound_us < math.inf:
            raise DearPlacementError(found.lower_bound_us, below_us)
        if found.mixture is None:
            return None
        self._warm_starts[_shape(placement)] = found.warm_start
        return found_placement(
            placement,
            found.mixture,
            request,
            self.mesh,
            self.prices,
            objective_us=found.mixture.objective_us,
            lower_bound_us=found.lower_bound_us,
            method=_COUNTED,
            seconds=found.seconds,
            memory_prices=found.memory_prices,
            proven=is_proven(found.gap, relative_gap),
        )

    def _or_alike(
        self,
        mixed: FoundPlacement,
        request: ResolvedRequest,
        relative_gap: float,
        ends: float,
        below_us: float,
    ) -> FoundPlacement:
        """A mixture, or the best of which alike layers do the same if that is cheaper.

        It is a mixture, too, which a search that ended with a gap may have missed. A search that
        must find something below another plan's cost is no better for it.
        """
        left, budget = ends - time.perf_counter(), request.memory_budget_bytes
        if mixed.report.proven or left <= 0 or below_us < math.inf:
            return mixed
        if budget is None or mixed.memory.total > budget:
            return mixed  # of a problem with few rows
        placement, cutoff = self.problem(request), mixed.report.objective_us
        try:
            alike = self._solved(
                placement, request, relative_gap, left, cutoff, most_parts=_ALIKE_PARTS
            )
        except (SolverError, InfeasiblePlacementError):  # nothing, or nothing cheaper
            return mixed
        return cheaper_of(mixed, alike, relative_gap)

    def _solved(
        self,
        placement: PlacementProblem,
        request: ResolvedRequest,
        relative_gap: float,
        time_limit_seconds: float,
        below_us: float,
        near: Sequence[NodeOption] | None = None,
        most_parts: float = math.inf,
    ) -> FoundPlacement:
        """The solution of one problem; ``near`` are options of nodes that are nearly right."""
        self._say_size(placement)
        warm_start = self._warm_starts.get(_shape(placement))
        if near is not None:
            warm_start = self._start(placement, near, relative_gap, time_limit_seconds)
        solution = self._solve(
            placement, request, relative_gap, time_limit_seconds, below_us, warm_start, most_parts
        )
        self._warm_starts[_shape(placement)] = solution.warm_start
        return found_placement(
            placement,
            solution.choices,
            request,
            self.mesh,
            self.prices,
            objective_us=solution.objective_us,
            lower_bound_us=solution.lower_bound_us,
            method=solution.method,
            seconds=solution.seconds["total"],
            memory_prices=solution.memory_prices,
            proven=solution.proven,
        )

    def _start(
        self,
        placement: PlacementProblem,
        near: Sequence[NodeOption],
        relative_gap: float,
        time_limit_seconds: float,
    ) -> WarmStart:
        """Near options of nodes, and where an earlier problem of this shape ended, if any has."""
        start = recomputing(placement, near, relative_gap, time_limit_seconds)
        known = self._warm_starts.get(_shape(placement))
        if known is None:
            return start
        return replace(known, choices=start.choices, candidates=(known.choices, *known.candidates))

    def _say_size(self, placement: PlacementProblem) -> None:
        self._say(
            f"{len(self.graph.nodes)} nodes, {len(placement.problem.variables)} choices, "
            f"{sum(map(len, placement.choices))} options, {len(placement.problem.edges)} edges"
        )

    def problem(self, request: ResolvedRequest, *, all_moments: bool = True) -> PlacementProblem:
        """The optimization problem of a request.

        Without ``all_moments`` a budget may be exceeded in the turns of layers and at reductions.
        """
        found = placement_problem(
            self.graph,
            self.mesh,
            self._options_of,
            self.prices,
            memory_budget_bytes=request.memory_budget_bytes,
            optimizer_state_copies=request.optimizer_state_copies,
            constraints=request.constraints,
            recomputes=request.recomputes and request.memory_budget_bytes is not None,
            microbatches=request.microbatches,
            loss_bytes=request.loss_bytes,
            accumulates_gradients=request.accumulates_gradients,
            all_moments=all_moments,
            tables=self._tables,
            times=self._times,
            parts=self._parts,
        )
        self._check_constraints(found, request)
        return found

    def _options_of(self, node: PlacementNode) -> tuple[NodeOption, ...]:
        operands = self.graph.operand_specs(node)
        if node.kind == "experts":
            return expert_options(node, operands, self.mesh)
        return node_options(node, operands, self.mesh, replicate_unknown=self.replicate_unknown)

    def _pins(self) -> ExpertPins:
        if self._expert_pins is None:
            self._expert_pins = expert_pins(
                self.graph, self.mesh, replicate_unknown=self.replicate_unknown
            )
        return self._expert_pins

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
        below_us: float,
        warm_start: WarmStart | None,
        most_parts: float,
    ) -> Solution:
        try:
            return solve(
                placement.problem,
                relative_gap=relative_gap,
                time_limit_seconds=time_limit_seconds,
                progress=lambda progress: self._say(str(progress)),
                warm_start=warm_start,
                rivals=expert_rivals(placement, self._pins()),
                below_us=below_us,
                most_parts=most_parts,
            )
        except (ForbiddenPairsError, MemoryBudgetError) as error:
            raise explained(error, placement, request, self.mesh) from error


def _shape(placement: PlacementProblem) -> tuple[int, ...]:
    """The numbers of options: where they are equal, one problem's choices are another's."""
    return tuple(map(len, placement.choices))
