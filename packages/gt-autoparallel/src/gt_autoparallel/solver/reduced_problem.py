"""The problem in working form: what is left of it shrinks while it is being solved.

Differences to ``Problem``: an edge from a variable to itself is a cost of the variable's options;
the edges between the same two variables are one link with one table; labels that no option has are
gone, and labels whose rows are equal are one; a link with a single label on one side is a cost of
the other side's options. None of this changes the cost of any choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from gt_autoparallel.solver.problem import BoolArray, Edge, FloatArray, IntArray, Problem

_MOST_PAIRS_OF_MERGED_LINK = 250_000


@dataclass(slots=True)
class Node:
    """A variable: the options that are left of it."""

    options: IntArray
    """[K] Their indices in the problem."""

    cost: FloatArray
    """[K] us that count in full."""

    compute: dict[int, FloatArray]
    """Window -> [K] us of its compute."""

    communication: dict[int, FloatArray]
    """Window -> [K] us of its communication."""

    memory: FloatArray
    """[memory rows, K] bytes."""

    num_alike: int = 1
    """How many things the node stands for that may each take another option (``mixtures``)."""

    links: list[int] = field(default_factory=list)
    """Indices of the links that end here."""

    def bounds_of_one(self, bounds: FloatArray) -> FloatArray:
        """[K] From bounds for the case that all things take an option to those for one of them.

        At fixed prices things are independent of each other: n of them that all take the option
        exceed the least bound n times as far as one does.
        """
        if self.num_alike == 1:
            return bounds
        least = bounds.min()
        single: FloatArray = least + (bounds - least) / self.num_alike
        return single


@dataclass(slots=True)
class Link:
    """All edges between two different variables."""

    ends: tuple[int, int]
    labels: list[IntArray]
    """For each end [K of its node]: label of each option."""

    cost: FloatArray
    """[labels of first end, labels of second end] us; inf forbids the pair."""

    communication: dict[int, FloatArray]
    """Window -> [labels, labels] us of its communication."""

    edges: tuple[int, ...]
    """Indices of the edges in the problem that it stands for."""

    messages: list[FloatArray] = field(default_factory=list)
    """For each end [labels] us that the bound moves from the table to the end's options."""

    is_compact: bool = False
    """Whether labels with equal rows in these tables are one."""

    def __post_init__(self) -> None:
        if not self.messages:
            self.messages = [np.zeros(size) for size in self.cost.shape]

    def side(self, node: int) -> int:
        """0 if ``node`` is the first end, 1 if the second."""
        return 0 if self.ends[0] == node else 1


class ReducedProblem:
    """Nodes, links, windows' multiplicities and what is left of each memory budget."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.nodes: list[Node] = []
        self.links: list[Link | None] = []
        self.constant_us = problem.fixed_us
        self.multiplicity = np.array([w.multiplicity for w in problem.windows], dtype=np.float64)
        self.budget_bytes = np.array([m.budget_bytes - m.fixed_bytes for m in problem.memory])
        self.removal_log: list[tuple[int, int]] = []
        """(node, link) of each removal by arc consistency, in order; explains conflicts."""

        self._changed_links: set[int] = set()
        self.linear_windows: dict[int, float] = {}
        """Windows that became linear, and the share of the price that compute bears."""

    def copy(self) -> ReducedProblem:
        """A copy whose options and links may change without changing these."""
        other = ReducedProblem(self.problem)
        other.constant_us = self.constant_us
        other.budget_bytes = self.budget_bytes
        other._changed_links = set(self._changed_links)
        other.linear_windows = dict(self.linear_windows)
        other.nodes = [
            replace(
                node,
                compute=dict(node.compute),
                communication=dict(node.communication),
                links=list(node.links),
            )
            for node in self.nodes
        ]
        other.links = [
            None
            if link is None
            else replace(
                link,
                labels=list(link.labels),
                communication=dict(link.communication),
                messages=list(link.messages),
            )
            for link in self.links
        ]
        return other

    @property
    def num_options(self) -> int:
        """Options left, of all nodes."""
        return sum(len(node.options) for node in self.nodes)

    @property
    def num_pairs(self) -> int:
        """Entries of all tables left."""
        return sum(link.cost.size for _, link in self.live_links())

    def live_links(self) -> Iterable[tuple[int, Link]]:
        """The links that are left, with their indices."""
        for index, link in enumerate(self.links):
            if link is not None:
                yield index, link

    def choices(self, positions: Iterable[int]) -> tuple[int, ...]:
        """Positions among the options left, as indices into the problem's options."""
        return tuple(
            int(node.options[position])
            for node, position in zip(self.nodes, positions, strict=True)
        )

    def keep(self, index: int, mask: np.ndarray) -> None:
        """Drops the options of one node where ``mask`` [K] is False. Links keep their labels."""
        node = self.nodes[index]
        node.options = node.options[mask]
        node.cost = node.cost[mask]
        node.compute = {w: times[mask] for w, times in node.compute.items()}
        node.communication = {w: times[mask] for w, times in node.communication.items()}
        node.memory = node.memory[:, mask]
        for position in node.links:
            link = self.links[position]
            if link is not None:
                self._changed_links.add(position)
                side = link.side(index)
                link.labels[side] = link.labels[side][mask]

    def compact_links(self) -> None:
        """Drops labels without options, merges equal ones, folds links with a single label.

        Looks at links of which an end lost options since the last time.
        """
        changed, self._changed_links = self._changed_links, set()
        for index in sorted(changed):
            link = self.links[index]
            assert link is not None, "a link that is gone has no ends that change"
            if not (link.is_compact and all(_in_use(link, side).all() for side in (0, 1))):
                _merge_labels(link)
            if 1 in link.cost.shape:
                self._fold(index, link)

    def _fold(self, index: int, link: Link) -> None:
        """Adds a link with one label at an end to the options of the other end."""
        side = 0 if link.cost.shape[1] == 1 else 1
        node = self.nodes[link.ends[side]]
        labels = link.labels[side]
        node.cost = node.cost + link.cost.ravel()[labels]
        for window, table in link.communication.items():
            times = table.ravel()[labels]
            node.communication[window] = node.communication.get(window, 0.0) + times
        for end in link.ends:
            self.nodes[end].links.remove(index)
        self.links[index] = None

    def settle_windows(self) -> None:
        """Makes windows linear of which it is known whether compute or communication is longer.

        If for all options left compute_w >= communication_w, then
        multiplicity_w * max(compute_w, communication_w) = multiplicity_w * compute_w,
        which counts in full; and the other way round.
        """
        low = np.zeros((2, len(self.multiplicity)))
        high = np.zeros((2, len(self.multiplicity)))
        for node in self.nodes:
            for row, times in ((0, node.compute), (1, node.communication)):
                for window, values in times.items():
                    low[row, window] += values.min()
                    high[row, window] += values.max()
        for _, link in self.live_links():
            finite = np.isfinite(link.cost)
            for window, table in link.communication.items():
                low[1, window] += table[finite].min()
                high[1, window] += table[finite].max()
        for window in range(len(self.multiplicity)):
            if low[0, window] >= high[1, window]:
                self._make_linear(window, compute=1.0)
            elif low[1, window] >= high[0, window]:
                self._make_linear(window, compute=0.0)

    def _make_linear(self, window: int, *, compute: float) -> None:
        weight = float(self.multiplicity[window])
        for node in self.nodes:
            for times, share in ((node.compute, compute), (node.communication, 1.0 - compute)):
                values = times.pop(window, None)
                if values is not None and share:
                    node.cost = node.cost + weight * values
        for _, link in self.live_links():
            table = link.communication.pop(window, None)
            if table is not None:
                link.is_compact = False
                if not compute:
                    link.cost = link.cost + weight * table
        self.linear_windows[window] = compute


def _in_use(link: Link, side: int) -> BoolArray:
    """[labels] Whether any option of the end has the label."""
    present = np.zeros(link.cost.shape[side], dtype=bool)
    present[link.labels[side]] = True
    return present


def _merge_labels(link: Link) -> None:
    """Drops labels that no option has; labels with equal rows in all tables become the first."""
    for side in (0, 1):
        present = _in_use(link, side)
        if not present.all():
            new = np.cumsum(present) - 1
            _take_labels(link, side, kept=np.flatnonzero(present), new=new)
    for side in (0, 1):
        tables = [link.cost, *link.communication.values()]
        rows = np.concatenate([table if side == 0 else table.T for table in tables], axis=1)
        first, new = _first_equal_rows(rows)
        if len(first) < len(new):
            _take_labels(link, side, kept=first, new=new)
    link.is_compact = True


def _first_equal_rows(rows: FloatArray) -> tuple[IntArray, IntArray]:
    """The first of each set of equal rows, in order, and [rows] the number of each row's set."""
    content, width = rows.tobytes(), rows.shape[1] * rows.itemsize
    numbers: dict[bytes, int] = {}
    first: list[int] = []
    number_of_row: list[int] = []
    for row in range(len(rows)):
        number = numbers.setdefault(content[row * width : (row + 1) * width], len(numbers))
        if number == len(first):
            first.append(row)
        number_of_row.append(number)
    return np.array(first, dtype=np.int64), np.array(number_of_row, dtype=np.int64)


def _take_labels(link: Link, side: int, *, kept: IntArray, new: IntArray) -> None:
    """Leaves the ``kept`` labels of one end; ``new`` [labels] is what each is called then."""
    link.cost = np.take(link.cost, kept, axis=side)
    link.communication = {w: np.take(t, kept, axis=side) for w, t in link.communication.items()}
    link.labels[side] = new[link.labels[side]]
    link.messages[side] = link.messages[side][kept]


def reduce_problem(problem: Problem, *, mixed: bool = False) -> ReducedProblem:
    """The working form of ``problem``, without the options of infinite cost.

    A node may be left without options; arc consistency finds that. ``mixed`` says whether things of
    the problem's blocks may take different options.
    """
    reduced = ReducedProblem(problem)
    for variable in problem.variables:
        finite = np.isfinite(variable.cost_us)
        compute = {}
        if variable.window is not None:
            finite &= np.isfinite(variable.window_compute_us)
            compute[variable.window] = np.asarray(variable.window_compute_us, dtype=np.float64)
        for window, times in variable.further_compute_us.items():
            finite &= np.isfinite(times)
            compute[window] = compute.get(window, 0.0) + np.asarray(times, dtype=np.float64)
        memory = np.zeros((len(problem.memory), len(variable.cost_us)))
        for row, values in enumerate(variable.memory_bytes):
            memory[row] = values
            finite &= np.isfinite(values)
        reduced.nodes.append(
            Node(
                options=np.flatnonzero(finite),
                cost=np.asarray(variable.cost_us, dtype=np.float64)[finite],
                compute={w: times[finite] for w, times in compute.items() if times[finite].any()},
                communication={},
                memory=memory[:, finite],
            )
        )
    for block in problem.blocks if mixed else ():
        for index in block.variables:
            reduced.nodes[index].num_alike = block.size
    for edge in problem.edges:
        if edge.left == edge.right:
            _add_self_edge(reduced, edge)
    _add_links(reduced)
    for row in range(len(problem.memory)):
        # A budget above what all could take together is no budget; inf becomes a number.
        most = sum(float(n.memory[row].max()) for n in reduced.nodes if len(n.options))
        reduced.budget_bytes[row] = min(reduced.budget_bytes[row], most)
    return reduced


def bytes_as_costs(reduced: ReducedProblem, row: int) -> ReducedProblem:
    """The problem whose objective is the bytes of one memory row, without budgets and windows."""
    other = reduced.copy()
    other.constant_us = 0.0
    other.budget_bytes = np.zeros(len(reduced.budget_bytes))
    for node in other.nodes:
        node.cost, node.compute, node.communication = node.memory[row], {}, {}
        node.memory = np.zeros_like(node.memory)
    for _, link in other.live_links():
        link.cost = np.where(np.isfinite(link.cost), 0.0, np.inf)
        link.communication = {}
        link.messages = [np.zeros(size) for size in link.cost.shape]
    return other


def _full_and_hidden(edge: Edge) -> tuple[FloatArray, dict[int, FloatArray]]:
    cost = np.asarray(edge.cost_us, dtype=np.float64)
    if edge.window is None:
        return cost, {}
    hidden = np.asarray(edge.window_communication_us, dtype=np.float64)
    allowed = np.isfinite(cost) & np.isfinite(hidden)
    cost = np.where(allowed, cost, np.inf)
    hidden = np.where(allowed, hidden, 0.0)
    return cost, {edge.window: hidden} if hidden.any() else {}


def _add_self_edge(reduced: ReducedProblem, edge: Edge) -> None:
    node = reduced.nodes[edge.left]
    pairs = (edge.left_labels[node.options], edge.right_labels[node.options])
    cost, hidden = _full_and_hidden(edge)
    node.cost = node.cost + cost[pairs]
    for window, table in hidden.items():
        node.communication[window] = node.communication.get(window, 0.0) + table[pairs]
    finite = np.isfinite(node.cost)
    if not finite.all():
        reduced.keep(edge.left, finite)


def _add_links(reduced: ReducedProblem) -> None:
    """One link for each pair of connected variables, in the order of their first edge.

    Several edges between a pair become one table over their combined labels. That makes the
    relaxation tighter, but a table that would get huge is left as several links.
    """
    for index, edge in enumerate(reduced.problem.edges):
        if edge.left == edge.right:
            continue
        ends = (min(edge.left, edge.right), max(edge.left, edge.right))
        cost, hidden = _full_and_hidden(edge)
        labels = [
            np.asarray(edge.left_labels, dtype=np.int64)[reduced.nodes[edge.left].options],
            np.asarray(edge.right_labels, dtype=np.int64)[reduced.nodes[edge.right].options],
        ]
        if edge.left > edge.right:
            labels.reverse()
            cost, hidden = cost.T, {w: table.T for w, table in hidden.items()}
        link = Link(ends=ends, labels=labels, cost=cost, communication=hidden, edges=(index,))
        if not all(len(side) for side in labels):
            _attach(reduced, link)
            continue
        _merge_labels(link)
        for position in reduced.nodes[ends[0]].links:
            other = reduced.links[position]
            if other is not None and other.ends == ends and _try_merge(other, link):
                break
        else:
            _attach(reduced, link)


def _attach(reduced: ReducedProblem, link: Link) -> None:
    for end in link.ends:
        reduced.nodes[end].links.append(len(reduced.links))
    reduced._changed_links.add(len(reduced.links))
    reduced.links.append(link)


def _try_merge(link: Link, other: Link) -> bool:
    """Adds ``other`` to ``link``, both between the same nodes, if the table stays small."""
    labels, rows, other_rows = [], [], []
    for side in (0, 1):
        width = other.cost.shape[side]
        used, merged = np.unique(
            link.labels[side] * width + other.labels[side], return_inverse=True
        )
        labels.append(merged)
        rows.append(used // width)
        other_rows.append(used % width)
    if len(rows[0]) * len(rows[1]) > _MOST_PAIRS_OF_MERGED_LINK:
        return False
    grid, other_grid = np.ix_(*rows), np.ix_(*other_rows)
    communication = {w: table[grid] for w, table in link.communication.items()}
    for window, table in other.communication.items():
        communication[window] = communication.get(window, 0.0) + table[other_grid]
    link.cost = link.cost[grid] + other.cost[other_grid]
    link.communication = communication
    link.labels = labels
    link.edges += other.edges
    link.is_compact = False
    link.messages = [np.zeros(size) for size in link.cost.shape]
    return True
