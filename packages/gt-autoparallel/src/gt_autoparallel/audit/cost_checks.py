"""Do a plan's times follow from its options? Every price asked for again, every sum made anew.

The walk goes over uses as they stand in the nodes' arguments; it knows no clusters and no tables:

    total = sum over windows of max(compute, communication) + sum of all that nothing hides

where a redistribution belongs to a window if it unshards a parameter (between the parameter, or a
cast of it, and whoever reads that) or reduces a gradient (between what computes the gradient and
its end, over views, casts and sums for it alone). What of it hides there is asked of the prices.
What runs again in the backward pays for its compute and its operands' redistributions a second
time, in the backward's window of its layer where windows count.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator

from torch.utils import _pytree as pytree

from gt_autoparallel.audit.parameter_ways import after_parameters, before_gradients
from gt_autoparallel.audit.scopes import scope
from gt_autoparallel.audit.step_walk import step_problems
from gt_autoparallel.graph.layouts import short_text
from gt_autoparallel.graph.parameter_chains import ParameterMove
from gt_autoparallel.graph.placement_graph import PlacementNode, Value
from gt_autoparallel.plan.placement_plan import PlacementPlan, PlannedRedistribution

PRECISION = 1e-6
"""Relative: sums of millions of floating-point numbers agree far better, other costs do not."""


class CostWalk:
    """Times of a plan, made anew; ``problems`` says where the plan has others."""

    def __init__(self, plan: PlacementPlan) -> None:
        self.problems: list[str] = []
        self.num_redistributions = 0
        self.num_steps = 0
        self._plan = plan
        self._compute: dict[str, list[float]] = defaultdict(list)
        self._communication: dict[str, list[float]] = defaultdict(list)
        self._in_full: list[float] = []
        self._runs_again = frozenset(plan.recomputed)
        self._unshards = after_parameters(plan.graph.nodes)
        self._reduces = before_gradients(plan.graph.nodes)
        self._walk_nodes()
        self._walk_uses()
        self.problems += _window_problems(plan, self._compute, self._communication)
        self.problems += self._total_problems()

    @property
    def total_us(self) -> float:
        """What the plan costs."""
        hidden = [
            max(math.fsum(self._compute[name]), math.fsum(self._communication[name]))
            for name in {**self._compute, **self._communication}
        ]
        return math.fsum([*hidden, *self._in_full])

    def _walk_nodes(self) -> None:
        plan = self._plan
        if len(plan.compute_us) != len(plan.graph.nodes):
            self.problems.append("one price for each node")
            return
        for node, option, planned in zip(
            plan.graph.nodes, plan.options, plan.compute_us, strict=True
        ):
            operands = plan.graph.operand_specs(node)
            price = plan.prices.compute_us(node, operands, option, plan.mesh)
            if not _agree(price, planned):
                self.problems.append(f"node {node.name!r} costs {price} us, planned as {planned}")
            self._compute[_window(node)].append(price)
            if node.index in self._runs_again:
                if node.phase == "backward":
                    price = plan.prices.between_products_us(node, operands, option, plan.mesh)
                self._compute[f"{scope(node)} backward"].append(price)

    def _walk_uses(self) -> None:
        plan = self._plan
        planned: dict[tuple[int, int, bool], PlannedRedistribution] = {}
        for each in plan.redistributions:
            key = (each.use.consumer, each.use.position, each.again)
            if key in planned:
                self.problems.append(f"two redistributions for operand {key[1]} of node {key[0]}")
            planned[key] = each
        for node in plan.graph.nodes:
            leaves = pytree.tree_leaves([node.args, node.kwargs])
            for position, value in enumerate(v for v in leaves if isinstance(v, Value)):
                # Routed experts run again on what their backward has been given.
                is_moved_again = node.index in self._runs_again and node.kind != "experts"
                times = (False, True) if is_moved_again else (False,)
                for again in times:
                    found = planned.pop((node.index, position, again), None)
                    self._check_use(node, position, value, found, again=again)
        for consumer, position, again in planned:
            self.problems.append(
                f"node {consumer} has no operand {position} to redistribute"
                + (" a second time" if again else "")
            )

    def _check_use(
        self,
        node: PlacementNode,
        position: int,
        value: Value,
        planned: PlannedRedistribution | None,
        *,
        again: bool,
    ) -> None:
        plan = self._plan
        spec = plan.graph.spec(value)
        source = plan.layout(value)
        target = plan.options[node.index].operands[position]
        steps = () if planned is None else planned.steps
        where = f"operand {position} of node {node.name!r}"
        way = f"{short_text(source)} -> {short_text(target)}"
        self.problems += [
            f"{where}, {way}: {problem}"
            for problem in step_problems(spec.shape, source, target, steps, plan.mesh)
        ]
        if planned is None:
            return
        move: ParameterMove | None = None
        if value.node in self._unshards:
            move = "unshard"
        elif node.index in self._reduces:
            move = "reduce_grad"
        times = [plan.prices.step_time(step, spec.dtype, plan.mesh, move) for step in steps]
        in_full_us = math.fsum(time.in_full_us for time in times)
        hidden_us = math.fsum(time.hidden_us for time in times)
        for what, ours, theirs in (
            ("costs", in_full_us, planned.in_full_us),
            ("may hide", hidden_us, planned.hidden_us),
        ):
            if not _agree(ours, theirs):
                self.problems.append(f"{where}, {way} {what} {ours} us, planned as {theirs}")
        window = None
        if move is not None:
            window = f"{scope(node)} backward" if again else _window(node)
        if window != planned.window:
            self.problems.append(
                f"{where}, {way} belongs to window {window!r}, planned in {planned.window!r}"
            )
        if value != planned.use.value:
            self.problems.append(f"{where} is {value}, planned as {planned.use.value}")
        self._in_full.append(in_full_us)
        if window is not None:
            self._communication[window].append(hidden_us)
        self.num_redistributions += 1
        self.num_steps += len(steps)

    def _total_problems(self) -> Iterator[str]:
        solver, total = self._plan.solver, self.total_us
        for name, claimed in (
            ("the solver's objective", solver.objective_us),
            ("the plan's own sum", self._plan.objective_us),
        ):
            if not _agree(total, claimed, PRECISION):
                off = (claimed - total) / total if total else math.inf
                yield f"the plan costs {total} us; {name} is {claimed} us, off by {off:+.3%}"
        if solver.lower_bound_us > total * (1 + PRECISION):
            yield f"the plan costs {total} us, less than the lower bound {solver.lower_bound_us} us"


def _window_problems(
    plan: PlacementPlan,
    compute: dict[str, list[float]],
    communication: dict[str, list[float]],
) -> Iterator[str]:
    counts = Counter(window.name for window in plan.windows)
    yield from (f"window {name!r} is there {n} times" for name, n in counts.items() if n > 1)
    planned = {window.name: (window.compute_us, window.communication_us) for window in plan.windows}
    known = {**compute, **communication}
    yield from (f"no node is in window {name!r}" for name in planned if name not in known)
    for name in known:
        found = (math.fsum(compute.get(name, ())), math.fsum(communication.get(name, ())))
        claimed = planned.get(name, (0.0, 0.0))
        for what, ours, theirs in zip(("computes", "communicates"), found, claimed, strict=True):
            if not _agree(ours, theirs):
                yield f"window {name!r} {what} for {ours} us, planned as {theirs}"


def _window(node: PlacementNode) -> str:
    """The layer, or the module at the top, in which a node runs; and its phase.

    A parameter is in that of the optimizer.
    """
    return f"{scope(node)} {'optimizer' if node.kind == 'parameter' else node.phase}"


def _agree(left: float, right: float, precision: float = 1e-9) -> bool:
    return math.isclose(left, right, rel_tol=precision, abs_tol=1e-9)
