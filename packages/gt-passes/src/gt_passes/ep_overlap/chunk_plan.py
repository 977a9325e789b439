"""What runs in chunks, with which states, and in which order.

States are worked out in execution order by the rules of operators. Then everything that only sums
feed, and that nothing in a region reads, is taken out of its region again: it runs once, on the
sum, which is right for every operator, rounds less, and is why a chunk's parameter gradients are
added to those before as soon as they exist. The eager producer does otherwise: there, each chunk
casts and reshapes its gradients before they are summed.
"""

from __future__ import annotations

import heapq
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from gt_config.node_keys import EpRegionAnnotation
from gt_passes._torch_internals import value_of
from gt_passes.aliasing import AliasClasses, written_nodes
from gt_passes.ep_overlap.chunk_rules import find_rule, local_layout, scattered
from gt_passes.ep_overlap.chunk_states import Local, Partial, Sharded, State, Whole
from gt_passes.ep_overlap.chunked_nodes import ChunkedNodes, Region
from gt_passes.ep_overlap.rule_calls import Call, Cut, NotProvenError, Outcome, describe
from gt_passes.errors import GraphChunkingError
from gt_trace.node_metadata import is_backward, read_annotation, sequence_number

__all__ = ["ChunkPlan", "plan_chunks"]

Unit = Node | Region
"""What stands at one place in the order: a node that runs once, or a region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """Everything that is decided before the graph is written anew."""

    regions: Mapping[Region, tuple[Node, ...]]
    """What runs once for each chunk, in execution order."""

    outcomes: Mapping[Node, Outcome]
    """By node that runs in chunks."""

    order: tuple[Unit, ...]
    extent: int
    entry_states: Mapping[Node, Sharded]
    """By node that runs once and of which each chunk reads its part."""


def plan_chunks(graph: Graph, chunked: ChunkedNodes, *, preserve_eager_order: bool) -> ChunkPlan:
    """Work out states and order.

    Args:
        graph: of the captured step.
        chunked: what runs in chunks.
        preserve_eager_order: sum what the eager producer sums, where it does.

    Raises:
        GraphChunkingError: an operator has no rule, or a rule refuses; something outside reads what
            cannot be made whole; or no order runs each region in one piece. All reasons are listed.
    """
    states = _States(graph, chunked, preserve_eager_order=preserve_eager_order)
    kept = states.run()
    regions: dict[Region, list[Node]] = defaultdict(list)
    for node, region in kept.items():
        regions[region].append(node)
    return ChunkPlan(
        regions={region: tuple(nodes) for region, nodes in regions.items()},
        outcomes={node: states.outcomes[node] for node in kept},
        order=_order(graph, kept, chunked.aliases),
        extent=chunked.extent,
        entry_states=states.entries,
    )


class _States:
    """States of what runs in chunks, and what is taken out again."""

    def __init__(self, graph: Graph, chunked: ChunkedNodes, *, preserve_eager_order: bool) -> None:
        self._chunked = chunked
        self._preserve_eager_order = preserve_eager_order
        self.entries = {node: Sharded(layout) for node, layout in chunked.entries.items()}
        self.outcomes: dict[Node, Outcome] = {}
        self._states: dict[Node, Any] = dict(self.entries)
        self._unproven: dict[Node, str] = {}
        self._expert_part = {
            node: annotation.kind
            for node in chunked.region_of
            if (annotation := read_annotation(node, EpRegionAnnotation)) is not None
        }
        self._forward_of: dict[int, Node] = {}
        for node in graph.nodes:
            number = sequence_number(node)
            if number is not None and not is_backward(node) and node.op == "call_function":
                self._forward_of.setdefault(number, node)

    def run(self) -> dict[Node, Region]:
        """The nodes that stay in their regions; all have outcomes."""
        for node in self._chunked.region_of:
            self._judge(node)
        kept = self._without_sums()
        problems = [
            f"{node.name} ({node.target}) in {region}: {self._unproven[node]}"
            for node, region in kept.items()
            if node in self._unproven and not self._reads_unproven(node)
        ]
        problems += self._escapes(kept)
        if problems:
            raise GraphChunkingError(problems)
        return kept

    def _judge(self, node: Node) -> None:
        try:
            outcome = self._outcome(node)
        except NotProvenError as error:
            self._unproven[node] = str(error)
            outcome = Outcome(state=Partial())  # if sums alone feed it, it is taken out
        if isinstance(outcome.state, Local):
            outcome = replace(outcome, state=self._leaving(node, outcome.state))
        self.outcomes[node] = outcome
        self._states[node] = outcome.state

    def _outcome(self, node: Node) -> Outcome:
        if self._reads_unproven(node):
            raise NotProvenError("an operand is not known")
        if node.target is operator.getitem:
            return self._item(node)
        in_experts = node in self._expert_part
        if not isinstance(value_of(node), (torch.Tensor, tuple, list)) and in_experts:
            return Outcome(state=Local())  # sizes that data decide
        number = sequence_number(node) if is_backward(node) else None
        call = Call(
            node,
            self._states,
            extent=self._chunked.extent,
            partner=None if number is None else self._forward_of.get(number),
            keeps_casts=self._preserve_eager_order,
        )
        found = find_rule(node.target)
        try:
            if found is None:
                raise NotProvenError(
                    "no rule says what this operator does to chunks; register one with "
                    "gt_passes.ep_overlap.rule, or leave it outside of the chunked modules"
                )
            outcome = found(call)
            if not isinstance(outcome, Outcome):
                outcome = Outcome(state=outcome)
        except NotProvenError:
            if not in_experts:
                raise
            outcome = self._by_contract(call, is_known=found is not None)
        self._check_writes(node, outcome)
        return outcome

    def _reads_unproven(self, node: Node) -> bool:
        return any(source in self._unproven for source in node.all_input_nodes)

    def _item(self, node: Node) -> Outcome:
        source, index = node.args
        assert isinstance(source, Node)  # as tracing makes it
        assert isinstance(index, int)
        states = self._states.get(source, Whole())
        return Outcome(state=states[index] if isinstance(states, tuple) else states)

    def _by_contract(self, call: Call, *, is_known: bool) -> Outcome:
        """The state in an expert-parallel part, where tokens are independent by contract."""
        placed = scattered(call)
        if placed is not None:
            return Outcome(state=placed)
        value = value_of(call.node)
        if isinstance(value, (tuple, list)):
            states = (Local(local_layout(call, each), permuted=is_known) for each in value)
            return Outcome(state=tuple(states))
        return Outcome(state=Local(local_layout(call, value), permuted=is_known))

    def _leaving(self, node: Node, state: Local) -> State:
        """What a value of an expert-parallel part is for those outside of it, by contract."""
        value = value_of(node)
        part = self._expert_part.get(node)
        leaves = part is not None and any(user not in self._expert_part for user in node.users)
        if not leaves or not isinstance(value, torch.Tensor):
            return state
        if state.layout is not None:
            return state if state.permuted else Sharded(state.layout)
        is_gradient = (
            is_backward(node)
            and part == "compute"
            and value.is_floating_point()
            and all(isinstance(size, int) for size in value.shape)
        )
        return Partial() if is_gradient else state

    def _check_writes(self, node: Node, outcome: Outcome) -> None:
        cut = {changed.node for changed in outcome.changed.values() if isinstance(changed, Cut)}
        for target in written_nodes(node):
            if target not in self._chunked.region_of:
                raise NotProvenError(f"each chunk would write to {target.name}, of which one is")
            if target in cut:
                raise NotProvenError(f"it writes a chunk into the whole of {target.name}")
            before = self._states[target]
            if before != outcome.state:
                if not isinstance(before, Local) and node not in self._expert_part:
                    raise NotProvenError(
                        f"it makes {target.name}, which is {describe(before)}, "
                        f"{describe(outcome.state)}"
                    )
                self._states[target] = outcome.state
                self.outcomes[target] = replace(self.outcomes[target], state=outcome.state)

    def _without_sums(self) -> dict[Node, Region]:
        """The chunked nodes without those that can run once, on sums."""
        region_of = self._chunked.region_of
        kept = dict(region_of)
        for node in reversed(region_of):
            chunked = [s for s in node.all_input_nodes if s in kept]
            if not chunked or any(user in kept for user in node.users):
                continue
            if self._preserve_eager_order and node not in self._unproven:
                continue
            found = {type(self._states[source]) for source in chunked}
            reads_parts = any(source in self.entries for source in node.all_input_nodes)
            if Partial in found and found <= {Partial, Whole} and not reads_parts:
                del kept[node]
        return kept

    def _escapes(self, kept: Mapping[Node, Region]) -> Iterator[str]:
        """Each value that is read outside and cannot be made whole."""
        for node, region in kept.items():
            reader = next((user for user in node.users if user not in kept), None)
            if reader is None or node in self._unproven:
                continue
            state = self._states[node]
            if isinstance(state, (Local, tuple)) or value_of(node) is None:
                yield (
                    f"{node.name} ({node.target}) in {region} is {describe(state)}, and "
                    f"{reader.name} reads it outside"
                )


def _order(
    graph: Graph, region_of: Mapping[Node, Region], aliases: AliasClasses
) -> tuple[Unit, ...]:
    """Every region in one piece, and all else as close to its place as that allows."""
    memory_order = _memory_order(graph, aliases)
    first: dict[Unit, int] = {}
    needs: dict[Unit, dict[Unit, None]] = {}
    for index, node in enumerate(graph.nodes):
        unit = region_of.get(node, node)
        first.setdefault(unit, index)
        wanted = needs.setdefault(unit, {})
        for source in (*node.all_input_nodes, *memory_order.get(node, ())):
            other = region_of.get(source, source)
            if other is not unit:
                wanted[other] = None
    users: dict[Unit, list[Unit]] = defaultdict(list)
    missing = {unit: len(wanted) for unit, wanted in needs.items()}
    for unit, wanted in needs.items():
        for other in wanted:
            users[other].append(unit)
    units = {index: unit for unit, index in first.items()}
    ready = [first[unit] for unit, count in missing.items() if count == 0]
    heapq.heapify(ready)
    order: list[Unit] = []
    while ready:
        unit = units[heapq.heappop(ready)]
        order.append(unit)
        for user in users[unit]:
            missing[user] -= 1
            if missing[user] == 0:
                heapq.heappush(ready, first[user])
    if len(order) < len(units):
        raise GraphChunkingError(_circles(missing, needs))
    return tuple(order)


def _memory_order(graph: Graph, aliases: AliasClasses) -> dict[Node, list[Node]]:
    """By node: what must stay before it because one of the two writes what the other reads."""
    before: dict[Node, list[Node]] = {}
    writer: dict[Node, Node] = {}
    readers: dict[Node, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        written = {aliases.class_of(target) for target in written_nodes(node)}
        for source in node.all_input_nodes:
            if not aliases.is_written(source):
                continue
            memory = aliases.class_of(source)
            earlier = before.setdefault(node, [])
            if memory in writer:
                earlier.append(writer[memory])
            if memory in written:
                earlier += readers.pop(memory, [])
                writer[memory] = node
            else:
                readers[memory].append(node)
    return before


def _circles(missing: Mapping[Unit, int], needs: Mapping[Unit, Mapping[Unit, None]]) -> list[str]:
    """What keeps regions from running in one piece: circles of what needs what."""
    stuck = {unit for unit, count in missing.items() if count}
    region = next(unit for unit in missing if unit in stuck and isinstance(unit, Region))
    path: list[Unit] = [region]
    while path.count(path[-1]) < 2:
        path.append(next(other for other in needs[path[-1]] if other in stuck))
    circle = path[path.index(path[-1]) :]
    return [
        f"{region} does not run in one piece: "
        + ", which needs ".join(str(unit) for unit in circle)
    ]
