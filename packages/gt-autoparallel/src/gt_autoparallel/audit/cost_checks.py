"""Do a plan's times follow from its options? Every price asked for again, every sum made anew.

The walk goes over uses as they stand in the nodes' arguments; it knows no clusters and no tables:

    total = sum over windows of max(compute, communication) + sum of all other redistributions

where a redistribution belongs to a window if it unshards a parameter (between the parameter, or a
cast of it, and whoever reads that) or reduces a gradient (between what computes the gradient and
its end, over casts and sums for it alone).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator

from torch.utils import _pytree as pytree

from gt_autoparallel._torch_internals import OpOverload, operator_path
from gt_autoparallel.audit.step_walk import step_problems
from gt_autoparallel.graph.layouts import short_text
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
        self._unshards = _after_parameters(plan.graph.nodes)
        self._reduces = _before_gradients(plan.graph.nodes)
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

    def _walk_uses(self) -> None:
        plan = self._plan
        planned: dict[tuple[int, int], PlannedRedistribution] = {}
        for each in plan.redistributions:
            key = (each.use.consumer, each.use.position)
            if key in planned:
                self.problems.append(f"two redistributions for operand {key[1]} of node {key[0]}")
            planned[key] = each
        for node in plan.graph.nodes:
            leaves = pytree.tree_leaves([node.args, node.kwargs])
            for position, value in enumerate(v for v in leaves if isinstance(v, Value)):
                self._check_use(node, position, value, planned.pop((node.index, position), None))
        for consumer, position in planned:
            self.problems.append(f"node {consumer} has no operand {position} to redistribute")

    def _check_use(
        self,
        node: PlacementNode,
        position: int,
        value: Value,
        planned: PlannedRedistribution | None,
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
        time_us = math.fsum(plan.prices.step_us(step, spec.dtype, plan.mesh) for step in steps)
        if not _agree(time_us, planned.time_us):
            self.problems.append(f"{where}, {way} costs {time_us} us, planned as {planned.time_us}")
        hides = value.node in self._unshards or node.index in self._reduces
        window = _window(node) if hides else None
        if window != planned.window:
            self.problems.append(
                f"{where}, {way} belongs to window {window!r}, planned in {planned.window!r}"
            )
        if value != planned.use.value:
            self.problems.append(f"{where} is {value}, planned as {planned.use.value}")
        (self._in_full if window is None else self._communication[window]).append(time_us)
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
    """The layer, or the module at the top, in which a node runs; and its phase."""
    parts = node.module.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    scope = ".".join(parts[: numbers[0] + 1]) if numbers else parts[0]
    return f"{scope or 'model'} {node.phase}"


def _after_parameters(nodes: tuple[PlacementNode, ...]) -> set[int]:
    """Parameters, and casts of them: what leaves these is a parameter on its way to its users."""
    found: set[int] = set()
    for node in nodes:
        if node.kind == "parameter" or (
            _only_casts(node) and all(value.node in found for value in node.operands)
        ):
            found.add(node.index)
    return found


def _before_gradients(nodes: tuple[PlacementNode, ...]) -> set[int]:
    """Gradients, and casts and sums that only they read."""
    readers: dict[int, list[int]] = defaultdict(list)
    for node in nodes:
        for value in node.operands:
            readers[value.node].append(node.index)
    found: set[int] = set()
    for node in reversed(nodes):
        passes_on = node.kind == "share" or _only_casts(node)
        only_read = len(readers[node.index]) == 1 and readers[node.index][0] in found
        if node.kind == "gradient" or (passes_on and only_read):
            found.add(node.index)
    return found


def _only_casts(node: PlacementNode) -> bool:
    if not isinstance(node.target, OpOverload) or len(node.operands) != 1:
        return False
    return ".".join(operator_path(node.target)[:2]) in (
        "aten._to_copy",
        "prims.convert_element_type",
    )


def _agree(left: float, right: float, precision: float = 1e-9) -> bool:
    return math.isclose(left, right, rel_tol=precision, abs_tol=1e-9)
