"""Why a tensor lies as it does: what the best plan costs in which it lies otherwise.

Each other layout is forced, and the whole problem solved again, everything else free to follow. So
the difference is what the layout really costs, not what it would cost if nothing else moved. Where
the solver runs out of time, the difference is given as the interval in which it lies. Nodes of
alike layers are forced together, as they were planned together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gt_autoparallel.argument_checks import check_arguments, kind_problem
from gt_autoparallel.errors import ConstraintError, InfeasiblePlacementError, SolverError
from gt_autoparallel.graph.experts import expert_weight_layout
from gt_autoparallel.graph.layouts import Layout, short_text
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.placement_graph import PlacementNode
from gt_autoparallel.plan.layer_ranges import ranged_rows
from gt_autoparallel.plan.placement_plan import PlacementPlan, plan_problem
from gt_autoparallel.planner import Planner
from gt_autoparallel.problem.problem_of_graph import PlacementProblem
from gt_autoparallel.problem.requested_memory import requested_memory
from gt_autoparallel.solver import WarmStart, solve
from gt_autoparallel.solver.problem import Problem

_GIB = 2**30
_EXACT_US = 1e-6
_OPTIMUM_GAP = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another layout, and the best plan that has it."""

    layout: Layout
    at_least_us: float
    """How much more that plan costs than this one, at least; negative if it may cost less."""

    at_most_us: float
    memory_bytes: int
    """How much more memory of a rank that plan takes."""

    num_moved_nodes: int
    """Nodes besides that lie otherwise in that plan."""

    impossible: str = ""
    """Why there is no plan with this layout; then the numbers are inf or 0."""

    @classmethod
    def bounded(cls, layout: Layout, *, at_least_us: float) -> Alternative:
        """One that no plan was looked for with; ``at_least_us`` is inf if there is none."""
        impossible = "the plan's constraints exclude it" if at_least_us == np.inf else ""
        return cls(
            layout=layout,
            at_least_us=at_least_us,
            at_most_us=np.inf,
            memory_bytes=0,
            num_moved_nodes=0,
            impossible=impossible,
        )

    @property
    def is_bound(self) -> bool:
        """Whether only a bound is known: no plan with this layout was found, or looked for."""
        return np.isinf(self.at_most_us) and not self.impossible

    @property
    def is_exact(self) -> bool:
        """Whether the difference is known exactly: the other plan is a proven optimum."""
        if not np.isfinite(self.at_most_us):
            return False
        return self.at_most_us - self.at_least_us <= _EXACT_US * max(1.0, abs(self.at_most_us))


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a node's result, or a parameter, has its layout."""

    name: str
    """Name of the node or parameter, with the range of the layers that share the choice."""

    layout: Layout
    alternatives: tuple[Alternative, ...]
    """The cheapest first, the impossible last."""

    costs_here: tuple[tuple[str, float], ...]
    """What the plan pays at this node, in us: its compute, and what moves to and from it."""

    memory_price_us_per_gib: float
    """Dual of the memory budget: what one GiB more would save at the margin."""

    def __str__(self) -> str:
        return "\n".join(_lines(self)) + "\n"


def explain(
    plan: PlacementPlan,
    name: str,
    *,
    layouts: Sequence[Layout] | None = None,
    planner: Planner | None = None,
    time_limit_seconds: float = 60.0,
) -> Explanation:
    """Why a node or parameter is placed as it is.

    Args:
        plan: the plan.
        name: of a node (``PlacementNode.name``), of a parameter (tied ones go by each name), or of
            the module of routed experts.
        layouts: the other layouts to ask about; all that the node has by default.
        planner: the one that made the plan, if it is at hand: it has the problem ready.
        time_limit_seconds: for each layout.

    Raises:
        ConstraintError: there is no such node, or it has no such layout.
        PlacementInputError: an argument is not what it must be.
    """
    name_problem = kind_problem(name, "name", str, "the name of a node or parameter")
    check_arguments("explain", plan_problem(plan), name_problem)
    node = _node(plan, name)
    planner = planner or new_planner(plan)
    placement = planner.problem(plan.request)
    start = placement.solution_of(plan.options, plan.recomputed)
    question = Question.of(plan, placement, node, start)
    chosen, offered = question.chosen, question.offered
    asked = offered if layouts is None else [layout for layout in layouts if layout != chosen]
    unknown = [layout for layout in asked if layout not in offered]
    if unknown:
        raise ConstraintError(
            f"node {node.name!r} cannot lie in {[short_text(each) for each in unknown]!r}; it can "
            f"in {[short_text(each) for each in dict.fromkeys(question.of_option)]!r}"
        )
    return question.explained(
        [question.answer(layout, time_limit_seconds=time_limit_seconds) for layout in asked]
    )


def explain_parameters(
    plan: PlacementPlan, *, planner: Planner | None = None, time_limit_seconds: float = 60.0
) -> dict[str, Explanation]:
    """Why each parameter is placed as it is, by name; those of alike layers are asked about once.

    As long as a search for every other layout of every kind of parameter: for a page that is read.

    Args:
        plan: the plan.
        planner: as for ``explain``.
        time_limit_seconds: for each layout.

    Raises:
        PlacementInputError: what is given is no plan.
    """
    check_arguments("explain_parameters", plan_problem(plan))
    planner = planner or new_planner(plan)
    clustering = planner.problem(plan.request).clustering
    of_class: dict[int, Explanation] = {}
    reasons = {}
    for node in plan.graph.of_kind("parameter"):
        number = clustering.class_of_node[node.index]
        if number not in of_class:
            of_class[number] = explain(
                plan, node.name, planner=planner, time_limit_seconds=time_limit_seconds
            )
        reasons[str(node.target)] = of_class[number]
    return reasons


def new_planner(plan: PlacementPlan) -> Planner:
    """One that plans what ``plan`` is for."""
    return Planner(
        plan.graph,
        plan.mesh,
        signature=plan.signature,
        prices=plan.prices,
        replicate_unknown=plan.request.replicate_unknown,
        optimizer_state_copies=plan.request.optimizer_state_copies,
        microbatches=plan.request.microbatches,
        loss_bytes=plan.request.loss_bytes,
        accumulates_gradients=plan.request.accumulates_gradients,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Why one node, and those that share its choice, lie as they do."""

    plan: PlacementPlan
    placement: PlacementProblem
    node: PlacementNode
    number: int
    """Of the node's variable."""

    of_option: tuple[Layout, ...]
    """Layout of each of its options."""

    start: tuple[int, ...]
    """The plan, as a choice for each variable."""

    @classmethod
    def of(
        cls,
        plan: PlacementPlan,
        placement: PlacementProblem,
        node: PlacementNode,
        start: tuple[int, ...],
    ) -> Question:
        """The question about ``node`` of a plan; ``start`` is the plan's choice in its problem."""
        number = placement.clustering.class_of_node[node.index]
        layouts = (_layout(node, choice.option) for choice in placement.choices[number])
        return cls(
            plan=plan,
            placement=placement,
            node=node,
            number=number,
            of_option=tuple(layouts),
            start=start,
        )

    @property
    def chosen(self) -> Layout:
        """The layout that is asked about."""
        return _layout(self.node, self.plan.options[self.node.index])

    @property
    def offered(self) -> list[Layout]:
        """The others that the node has."""
        return [layout for layout in dict.fromkeys(self.of_option) if layout != self.chosen]

    def allows(self, layout: Layout) -> NDArray[np.bool_]:
        """[options] Which of them have the layout."""
        return np.array([each == layout for each in self.of_option])

    def answer(self, layout: Layout, *, time_limit_seconds: float) -> Alternative:
        """The best plan in which the node lies otherwise."""
        return _alternative(
            self.plan,
            self.placement,
            self.number,
            layout,
            _forced(self.placement.problem, self.number, self.allows(layout)),
            WarmStart(choices=self.start),
            time_limit_seconds,
        )

    def explained(self, alternatives: Sequence[Alternative]) -> Explanation:
        """The whole answer."""
        nodes, node = self.plan.graph.nodes, self.node
        # Alike layers need not be placed alike.
        members = [
            nodes[index].name
            for index in self.placement.clustering.members[self.number]
            if _layout(nodes[index], self.plan.options[index]) == self.chosen
        ]
        names = ", ".join(row.name for row in ranged_rows((each, None) for each in members))
        return Explanation(
            name=f"weights in {names}" if node.kind == "experts" else names,
            layout=self.chosen,
            alternatives=tuple(
                sorted(
                    alternatives, key=lambda a: (a.at_most_us, a.at_least_us, short_text(a.layout))
                )
            ),
            costs_here=tuple(_costs_here(self.plan, node)),
            memory_price_us_per_gib=self.plan.solver.memory_price_us_per_gib,
        )


def _node(plan: PlacementPlan, name: str) -> PlacementNode:
    """The node of this name, or that of the parameter or of the routed experts of this name."""
    by_name = {node.name: node for node in plan.graph.nodes}
    parameters = {str(node.target): node for node in plan.graph.of_kind("parameter")}
    aliased = plan.graph.parameter_aliases.get(name, name)
    experts = {str(n.target): n for n in plan.graph.of_kind("experts") if n.phase == "forward"}
    node = by_name.get(name) or by_name.get(aliased) or parameters.get(aliased) or experts.get(name)
    if node is None:
        raise ConstraintError(
            f"there is no node or parameter {name!r}; parameters are {list(parameters)[:5]!r}..."
        )
    return node


def _layout(node: PlacementNode, option: NodeOption) -> Layout:
    """What is explained: the layout of the first result, of a sink that of what it takes.

    Of routed experts it is that of the weights that they compute with: it tells where experts are.
    """
    if node.kind == "experts":
        return expert_weight_layout(node, option)
    layout = next((each for each in option.outputs if each is not None), None)
    return option.operands[0] if layout is None else layout


def _forced(problem: Problem, number: int, allowed: NDArray[np.bool_]) -> Problem:
    """The problem in which one variable may take some of its options only."""
    variable = problem.variables[number]
    cost_us = np.where(allowed, variable.cost_us, np.inf)
    variables = list(problem.variables)
    variables[number] = replace(variable, cost_us=cost_us)
    return replace(problem, variables=tuple(variables))


def _alternative(
    plan: PlacementPlan,
    placement: PlacementProblem,
    number: int,
    layout: Layout,
    problem: Problem,
    warm_start: WarmStart,
    time_limit_seconds: float,
) -> Alternative:
    try:
        solution = solve(problem, time_limit_seconds=time_limit_seconds, warm_start=warm_start)
    except SolverError:
        # Time was over before a plan was found, and a bound was: nothing is known.
        return Alternative.bounded(layout, at_least_us=-np.inf)
    except InfeasiblePlacementError as error:
        return Alternative(
            layout=layout,
            at_least_us=np.inf,
            at_most_us=np.inf,
            memory_bytes=0,
            num_moved_nodes=0,
            impossible=str(error).splitlines()[0],
        )
    options = placement.options_of_nodes(solution.choices)
    recomputed = placement.recomputed_nodes(solution.choices)
    memory = requested_memory(plan.graph, options, plan.mesh, plan.request, recomputed=recomputed)
    asked_about = set(placement.clustering.members[number])
    moved = sum(
        _layout(node, ours) != _layout(node, theirs)
        for node, ours, theirs in zip(plan.graph.nodes, plan.options, options, strict=True)
        if node.index not in asked_about
    )
    is_optimum = solution.gap <= _OPTIMUM_GAP
    lowest = solution.objective_us if is_optimum else solution.lower_bound_us
    return Alternative(
        layout=layout,
        at_least_us=lowest - plan.solver.objective_us,
        at_most_us=solution.objective_us - plan.solver.objective_us,
        memory_bytes=memory.total - plan.memory.total,
        num_moved_nodes=moved,
    )


def _costs_here(plan: PlacementPlan, node: PlacementNode) -> Iterator[tuple[str, float]]:
    if plan.compute_us[node.index]:
        yield "compute", plan.compute_us[node.index]
        if node.index in plan.recomputed and node.phase == "forward":
            yield "compute again in the backward", plan.compute_us[node.index]
        elif node.index in plan.recomputed:
            time_us = plan.prices.between_products_us(
                node, plan.graph.operand_specs(node), plan.options[node.index], plan.mesh
            )
            yield "compute again what lies between products", time_us
    for each in plan.redistributions:
        kinds = " and ".join(
            f"{step.kind} along {plan.mesh.names[step.axis]}" for step in each.steps
        )
        again = ", again in the backward" if each.again else ""
        may_hide = f", of which its window may hide {each.hidden_us:,.1f} us"
        hidden = may_hide if each.hidden_us else ""
        if each.use.consumer == node.index:
            source = plan.graph.nodes[each.use.value.node].name
            yield f"from {source}: {kinds}{again}{hidden}", each.time_us
        elif each.use.value.node == node.index:
            target = plan.graph.nodes[each.use.consumer].name
            yield f"to {target}: {kinds}{again}{hidden}", each.time_us


def _lines(explanation: Explanation) -> Iterator[str]:
    yield f"{explanation.name} is {short_text(explanation.layout)}"
    for what, time_us in explanation.costs_here:
        yield f"  pays {time_us:,.1f} us: {what}"
    for each in explanation.alternatives:
        text = short_text(each.layout)
        if each.impossible:
            yield f"  {text} is impossible: {each.impossible}"
            continue
        if each.is_bound:
            yield f"  {text} costs at least {max(each.at_least_us, 0.0):+,.1f} us (a bound)"
            continue
        if each.is_exact:
            cost = f"costs {each.at_most_us:+,.1f} us"
        else:
            cost = f"costs between {each.at_least_us:+,.1f} and {each.at_most_us:+,.1f} us (bounds)"
        yield (
            f"  {text} {cost}, {each.memory_bytes:+,} bytes, moves {each.num_moved_nodes} other "
            "nodes"
        )
    if explanation.memory_price_us_per_gib > 0:
        yield (
            f"  one GiB more of memory would save {explanation.memory_price_us_per_gib:,.1f} us at "
            "the margin"
        )
