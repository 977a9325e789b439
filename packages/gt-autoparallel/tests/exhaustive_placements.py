"""All placements of a small graph.

``Exhaustive`` prices every combination of options, with every set of nodes that run again in the
backward, by walking the whole graph, with array operations over all options at once; it shares
with the planner only options and the prices of single nodes and steps.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import Placement

from gt_autoparallel.graph.layouts import Layout, MeshShape, num_local_elements
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.parameter_chains import ParameterMove
from gt_autoparallel.graph.placement_graph import (
    PlacementGraph,
    PlacementNode,
    Value,
)
from gt_autoparallel.graph.redistribution import can_redistribute, redistribution_steps
from gt_autoparallel.prices.costs import PlacementPrices
from gt_autoparallel.rules import node_options

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Everything:
    """Cost and bytes of every combination of options, inf where it is forbidden."""

    total_us: NDArray[np.float64]
    memory_bytes: NDArray[np.float64]


class Exhaustive:
    """Every placement in which nodes of one class have one option.

    Args:
        graph: what is placed.
        mesh: sizes of the axes.
        class_of_node: of each node.
        loss_bytes: what the loss takes.
        accumulates_gradients: whether there are gradients of microbatches before.
        pinned: names of nodes -> the only layouts that their results have, or what they read if
            they have none.
    """

    def __init__(
        self,
        graph: PlacementGraph,
        mesh: MeshShape,
        class_of_node: Sequence[int],
        *,
        loss_bytes: int = 0,
        accumulates_gradients: bool = False,
        pinned: Mapping[str, Layout] | None = None,
    ) -> None:
        self._graph, self._mesh, self._classes = graph, mesh, class_of_node
        self._loss_bytes, self._accumulates = loss_bytes, accumulates_gradients
        self._again: frozenset[int] = frozenset()
        """Classes of the nodes that run again, in the walk that is under way."""
        self._prices = PlacementPrices()
        first = {c: graph.nodes[class_of_node.index(c)] for c in sorted(set(class_of_node))}
        pins = pinned or {}
        self._options: list[tuple[NodeOption, ...]] = [
            tuple(
                option
                for option in node_options(node, tuple(map(graph.spec, node.operands)), mesh)
                if node.name not in pins
                or (option.outputs or option.operands)[0] == pins[node.name]
            )
            for node in first.values()
        ]

    @property
    def num_combinations(self) -> int:
        return math.prod(map(len, self._options))

    def recomputable(self) -> list[int]:
        """Classes of nodes that may run again: of layers, read in them alone, not for nobody."""
        graph = self._graph
        seen_by: list[set[str]] = [set() for _ in graph.nodes]
        for node in reversed(graph.nodes):
            for value in node.operands:
                seen_by[value.node].add("" if node.kind == "output" else node.module or "model")
                if _is_view(node) and node.phase == "forward":
                    seen_by[value.node] |= seen_by[node.index]
        return sorted(
            {
                self._classes[node.index]
                for node in graph.nodes
                if node.phase == "forward"
                and node.kind in ("operator", "share")
                and node.module
                and seen_by[node.index] == {node.module}
                and any(node.index in {v.node for v in reader.operands}
                        for reader in graph.nodes if reader.phase == "forward")
            }
        )  # fmt: skip

    def everything_and_again(self) -> Iterator[Everything]:
        """``everything``, for each set of classes that run again."""
        candidates = self.recomputable()
        for size in range(len(candidates) + 1):
            for classes in itertools.combinations(candidates, size):
                yield self.everything(frozenset(classes))

    def memory_of(self, options: Sequence[NodeOption], again: frozenset[int]) -> float:
        """Bytes of one placement; ``again`` as for ``everything``."""
        first = {number: node for node, number in reversed([*enumerate(self._classes)])}
        of_classes = zip(sorted(first), self._options, strict=True)
        place = tuple(mine.index(options[first[number]]) for number, mine in of_classes)
        memory = np.broadcast_to(
            self.everything(again).memory_bytes, tuple(map(len, self._options))
        )
        return float(memory[place])

    def everything(self, again: frozenset[int] = frozenset()) -> Everything:
        """Walks all nodes and uses once, for all combinations at once.

        ``again`` are the classes of the nodes that run again.
        """
        self._again = again
        graph, zero = self._graph, np.zeros([1] * len(self._options))
        total, compute, hidden = zero, {}, {}
        reads = self._reads()
        for node in graph.nodes:
            operands = tuple(map(graph.spec, node.operands))
            window = _window(node)
            mine = self._options[self._classes[node.index]]
            prices = [self._prices.compute_us(node, operands, o, self._mesh) for o in mine]
            compute[window] = compute.get(window, zero) + self._along(node, np.array(prices))
            later = f"{window.split()[0]} backward" if node.module else " backward"
            runs_again = self._runs_again(node)
            if runs_again:
                compute[later] = compute.get(later, zero) + self._along(node, np.array(prices))
            for position, value in enumerate(node.operands):
                maker = graph.nodes[value.node]
                into_gradient = node.kind == "gradient" or (
                    node.kind == "share" and reads[node.index] == ["gradient"]
                )
                move: ParameterMove | None = "reduce_grad" if into_gradient else None
                move = "unshard" if maker.kind == "parameter" else move
                ways = self._ways(value, node, position, move)
                in_full, may_hide = (self._pairs(maker, node, times) for times in ways)
                for at in (window, later) if runs_again else (window,):
                    hidden[at] = hidden.get(at, zero) + may_hide
                    total = total + in_full
            if runs_again and _is_view(node):
                total = total + np.where(self._moved(node), 0.0, np.inf)
            total = total + self._links(node)
        for window, times in compute.items():
            total = total + np.maximum(times, hidden.get(window, zero))
        return Everything(total_us=total, memory_bytes=self._memory(zero) + zero)

    def _runs_again(self, node: PlacementNode) -> bool:
        return self._classes[node.index] in self._again

    def _reads(self) -> list[list[str]]:
        kinds: list[list[str]] = [[] for _ in self._graph.nodes]
        for node in self._graph.nodes:
            for value in node.operands:
                kinds[value.node].append(node.kind)
        return kinds

    def _along(self, node: PlacementNode, values: NDArray[Any]) -> NDArray[Any]:
        """Numbers for the options of one node, as an array over all combinations."""
        shape = [1] * len(self._options)
        shape[self._classes[node.index]] = len(values)
        return values.reshape(shape)

    def _pairs(
        self, left: PlacementNode, right: PlacementNode, table: NDArray[Any]
    ) -> NDArray[Any]:
        """A [left's options, right's options] table as an array over all combinations."""
        a, b = self._classes[left.index], self._classes[right.index]
        if a == b:
            return self._along(left, np.diagonal(table).copy())
        shape = [1] * len(self._options)
        shape[a], shape[b] = table.shape
        return (table if a < b else table.T).reshape(shape)

    def _ways(
        self, value: Value, reader: PlacementNode, position: int, move: ParameterMove | None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What counts in full, and what may hide."""
        tensor = self._graph.spec(value)
        makers = self._options[self._classes[value.node]]
        readers = self._options[self._classes[reader.index]]
        table = np.full((len(makers), len(readers)), np.inf)
        hidden = np.zeros(table.shape)
        for i, maker in enumerate(makers):
            there = maker.outputs[value.output]
            for j, option in enumerate(readers):
                wanted = option.operands[position]
                assert there is not None
                if can_redistribute(there, wanted):
                    steps = redistribution_steps(tensor.shape, there, wanted, self._mesh)
                    times = [
                        self._prices.step_time(step, tensor.dtype, self._mesh, move)
                        for step in steps
                    ]
                    table[i, j] = sum(time.in_full_us for time in times)
                    hidden[i, j] = sum(time.hidden_us for time in times)
        return table, hidden

    def _links(self, node: PlacementNode) -> NDArray[Any]:
        """Gradients lie as their parameters, tangents as their outputs."""
        partner_kind = {"gradient": "parameter", "tangent": "output"}.get(node.kind)
        if partner_kind is None:
            return np.zeros([1] * len(self._options))
        name = str(node.target).removesuffix("/tangent")
        (partner,) = [n for n in self._graph.of_kind(partner_kind) if n.target == name]  # type: ignore[arg-type]  # one of the kinds
        table = [
            [0.0 if (p.outputs or p.operands)[0] == (o.outputs or o.operands)[0] else np.inf
             for o in self._options[self._classes[node.index]]]
            for p in self._options[self._classes[partner.index]]
        ]  # fmt: skip
        return self._pairs(partner, node, np.array(table))

    def _memory(self, zero: NDArray[Any]) -> NDArray[Any]:
        """Parameters three times (with Adam's state), and the fullest moment of what comes and goes.

        For each layer two moments: none had its turn in the backward yet, or those after it had.
        """
        graph = self._graph
        total = zero
        gradients: dict[str, Any] = {}
        saved: dict[str, Any] = {}
        ahead: dict[str, Any] = {}
        in_flight: dict[str, Any] = {}
        needed: dict[Value, Any] = {}
        made: dict[str, Any] = {}
        for node in reversed(graph.nodes):
            options = self._options[self._classes[node.index]]
            if node.kind == "parameter":
                total = total + self._along(node, 3.0 * self._output_bytes(node, options, 0))
            elif node.kind == "gradient":
                mine = self._along(node, self._operand_bytes(node, options))
                gradients[node.module] = gradients.get(node.module, zero) + mine
                whole = self._unreduced(node.operands[0])
                in_flight[node.module] = in_flight.get(node.module, zero) + whole
            if node.phase == "backward" or self._runs_again(node):
                for value in node.operands:
                    if graph.nodes[value.node].phase == "forward":
                        needed[value] = True
            if self._runs_again(node):
                sizes = (
                    self._operand_bytes(node, options)
                    if _is_view(node)
                    else self._output_bytes(node, options, 0)
                )
                made[node.module] = made.get(node.module, zero) + self._along(node, sizes)
                if node.kind == "share" and graph.nodes[node.operands[0].node].kind == "parameter":
                    ahead[node.module] = ahead.get(node.module, zero) + self._along(node, sizes)
            if node.phase == "backward" or self._runs_again(node):
                continue
            for position in range(len(node.outputs)):
                wanted = needed.get(Value(node.index, position), False)
                if wanted is False or node.kind in ("parameter", "input"):
                    continue
                if not _is_view(node):
                    mine = self._along(node, self._output_bytes(node, options, position))
                    saved[node.module] = saved.get(node.module, zero) + wanted * mine
        # Views hand on what is needed of them; several outputs of one view are one storage.
        self._add_views(zero, needed, saved)
        before = sum(gradients.values(), zero) if self._accumulates else zero
        # A layer's turn is where it makes gradients.
        backward = [node.module for node in graph.nodes if node.kind == "gradient" and node.module]
        layers = [*reversed(backward)]
        moments = [sum(saved.values(), before + self._loss_bytes)]
        for place, layer in enumerate(layers):
            own = ahead.get(layer, zero) + made.get(layer, zero)
            reduced = ahead.get(layer, zero) + in_flight.get(layer, zero) - saved.get(layer, zero)
            later, earlier = layers[place + 1 :], layers[:place]
            for gone, to_come in (([], earlier + later), (later, earlier)):
                there = sum((size for of, size in saved.items() if of not in gone), before)
                there = sum((size for of, size in gradients.items() if of not in to_come), there)
                moments += [there + own, *([there + reduced] if layer in in_flight else [])]
        if not layers:
            moments.append(sum(saved.values(), before) + sum(gradients.values(), zero))
        return total + functools.reduce(np.maximum, moments)

    def _unreduced(self, gradient: Value) -> NDArray[Any]:
        """A gradient and its copy in a bucket, where it is a sum over ranks."""
        node = self._graph.nodes[gradient.node]
        options = self._options[self._classes[node.index]]
        is_sum = [any(map(Placement.is_partial, o.outputs[0] or ())) for o in options]
        return self._along(node, 2.0 * self._output_bytes(node, options, 0) * np.array(is_sum))

    def _add_views(
        self, zero: NDArray[Any], needed: dict[Value, Any], saved: dict[str, Any]
    ) -> None:
        graph = self._graph
        for node in reversed(graph.nodes):
            if node.phase == "backward" or not _is_view(node) or self._runs_again(node):
                continue
            wanted: Any = False
            for position in range(len(node.outputs)):
                wanted = np.logical_or(wanted, needed.get(Value(node.index, position), False))
            if wanted is False or not np.any(wanted):
                continue
            (source,) = node.operands
            options = self._options[self._classes[node.index]]
            makers = self._options[self._classes[source.node]]
            moved = self._moved(node)
            own = wanted * moved * self._along(node, self._operand_bytes(node, options))
            saved[node.module] = saved.get(node.module, zero) + own
            stays = np.logical_and(wanted, ~moved)
            before = needed.get(source, False)
            needed[source] = np.logical_or(before, stays)
            maker = graph.nodes[source.node]
            is_there = maker.kind in ("parameter", "input") or self._runs_again(maker)
            if not _is_view(maker) and not is_there:
                mine = self._output_bytes(maker, makers, source.output)
                added = np.logical_and(stays, np.logical_not(before)) * self._along(maker, mine)
                saved[maker.module] = saved.get(maker.module, zero) + added

    def _moved(self, view: PlacementNode) -> NDArray[Any]:
        """Whether what a view views is moved before, over all combinations."""
        (source,) = view.operands
        options = self._options[self._classes[view.index]]
        makers = self._options[self._classes[source.node]]
        table = [[m.outputs[source.output] != o.operands[0] for o in options] for m in makers]
        return self._pairs(self._graph.nodes[source.node], view, np.array(table))

    def _output_bytes(
        self, node: PlacementNode, options: Sequence[NodeOption], position: int
    ) -> NDArray[np.float64]:
        tensor = node.outputs[position]
        assert tensor is not None
        return np.array([4.0 * num_local_elements(tensor.shape, o.outputs[position], self._mesh)  # type: ignore[arg-type]  # tensors have layouts
                         for o in options])  # fmt: skip

    def _operand_bytes(
        self, node: PlacementNode, options: Sequence[NodeOption]
    ) -> NDArray[np.float64]:
        tensor = self._graph.spec(node.operands[0])
        return np.array(
            [4.0 * num_local_elements(tensor.shape, o.operands[0], self._mesh) for o in options]
        )


def _is_view(node: PlacementNode) -> bool:
    return node.kind == "share" or node.target in (aten.t.default, aten.split.Tensor)


def _window(node: PlacementNode) -> str:
    parts = node.module.split(".")
    phase = "optimizer" if node.kind == "parameter" else node.phase
    return f"{'.'.join(parts[:2])} {phase}"
