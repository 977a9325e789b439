"""What runs in chunks, with which states, and in which order.

States are worked out in execution order by the rules of operators. Then everything that only sums
feed, and that nothing in a region reads, is taken out of its region again: it runs once, on the
sum, which is right for every operator, rounds less, and is why a chunk's parameter gradients are
added to those before as soon as they exist. The eager producer does otherwise: there, each chunk
casts and reshapes its gradients before they are summed.
"""

from __future__ import annotations

import graphlib
import heapq
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from gt_config.node_keys import EpRegionAnnotation
from gt_passes._torch_internals import value_of
from gt_passes.analysis.aliasing import AliasClasses, written_nodes
from gt_passes.ep_overlap import flex_attention_rules as _flex_attention_rules  # noqa: F401  # registers
from gt_passes.ep_overlap.chunk_rules import find_rule, outcome_by_contract
from gt_passes.ep_overlap.chunk_states import Layout, Local, Partial, Sharded, Whole, describe
from gt_passes.ep_overlap.chunked_nodes import ChunkedNodes, Region
from gt_passes.ep_overlap.rule_calls import NotProvenError, RuleCall, RuleOutcome
from gt_passes.errors import GraphChunkingError
from gt_trace.node_metadata import is_backward, read_annotation, sequence_number

Unit = Node | Region
"""What stands at one place in the order: a node that runs once, or a region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """Everything that is decided before the graph is written anew."""

    regions: Mapping[Region, Sequence[Node]]
    """What runs once for each chunk, in execution order."""

    outcomes: Mapping[Node, RuleOutcome]
    """What the rules answered for each node that runs in chunks."""

    entries: Mapping[Node, Layout]
    """The layout of each node that runs once and of which each chunk reads its part."""

    order: tuple[Unit, ...]


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
    order = _order(graph, kept, chunked.aliases)
    regions: dict[Region, list[Node]] = {unit: [] for unit in order if isinstance(unit, Region)}
    for node, region in kept.items():
        regions[region].append(node)
    return ChunkPlan(
        regions=regions,
        outcomes=states.outcomes,
        entries=chunked.entries,
        order=order,
    )


class _States:
    """States of what runs in chunks, and what is taken out again."""

    def __init__(self, graph: Graph, chunked: ChunkedNodes, *, preserve_eager_order: bool) -> None:
        self._chunked = chunked
        self._preserve_eager_order = preserve_eager_order
        self.outcomes = {
            node: RuleOutcome(state=Sharded(layout)) for node, layout in chunked.entries.items()
        }
        self._unproven: dict[Node, str] = {}
        self._expert_part = {
            node: annotation.kind
            for node in chunked.region_of
            if (annotation := read_annotation(node, EpRegionAnnotation)) is not None
        }
        self._forward_of: dict[int | None, Node] = {}
        for node in graph.nodes:
            if not is_backward(node) and node.op == "call_function":
                self._forward_of.setdefault(sequence_number(node), node)

    def run(self) -> dict[Node, Region]:
        """The nodes that stay in their regions; all have outcomes."""
        for node in self._chunked.region_of:
            try:
                self.outcomes[node] = self._outcome(node)
            except NotProvenError as error:
                self._unproven[node] = str(error)
                # Should sums alone feed it, it is taken out.
                self.outcomes[node] = RuleOutcome(state=Partial())
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

    def _outcome(self, node: Node) -> RuleOutcome:
        if self._reads_unproven(node):
            raise NotProvenError("an operand is not known")
        in_experts = node in self._expert_part
        if node.target is operator.getitem:
            source, index = node.all_input_nodes[0], node.args[1]
            states = self.outcomes[source].state if source in self.outcomes else Whole()
            item = states[index] if isinstance(states, tuple) and isinstance(index, int) else states
            outcome = RuleOutcome(state=item)
        elif in_experts and not isinstance(value_of(node), (torch.Tensor, tuple, list)):
            outcome = RuleOutcome(state=Local())  # sizes that data decide
        else:
            outcome = self._judge(node)
            self._check_writes(node, outcome)
        return self._leaving(node, outcome)

    def _judge(self, node: Node) -> RuleOutcome:
        """What the rule of a node's operator says; if it has none that holds, the contract."""
        number = sequence_number(node) if is_backward(node) else None
        call = RuleCall(
            node=node,
            outcomes=self.outcomes,
            extent=self._chunked.extent,
            partner=None if number is None else self._forward_of.get(number),
            keeps_casts=self._preserve_eager_order,
        )
        rule = find_rule(node)
        try:
            if rule is None:
                raise NotProvenError(
                    "no rule says what this operator does to chunks; register one with "
                    "gt_passes.ep_overlap.rule, or leave it outside of the chunked modules"
                )
            answer = rule(call)
        except NotProvenError:
            if node not in self._expert_part:
                raise
            answer = outcome_by_contract(call, permuted=rule is not None)
        return answer if isinstance(answer, RuleOutcome) else RuleOutcome(state=answer)

    def _reads_unproven(self, node: Node) -> bool:
        return any(source in self._unproven for source in node.all_input_nodes)

    def _leaving(self, node: Node, outcome: RuleOutcome) -> RuleOutcome:
        """What a value of an expert-parallel part is for those outside of it, by contract."""
        state, value, part = outcome.state, value_of(node), self._expert_part.get(node)
        leaves = part is not None and any(user not in self._expert_part for user in node.users)
        if not leaves or not isinstance(state, Local) or not isinstance(value, torch.Tensor):
            return outcome
        if state.layout is not None:
            return outcome if state.permuted else replace(outcome, state=Sharded(state.layout))
        is_gradient = is_backward(node) and part == "compute" and value.is_floating_point()
        if is_gradient and all(isinstance(size, int) for size in value.shape):
            return replace(outcome, state=Partial())
        return outcome

    def _check_writes(self, node: Node, outcome: RuleOutcome) -> None:
        for target in written_nodes(node):
            if target not in self._chunked.region_of:
                raise NotProvenError(f"each chunk would write to {target.name}, of which one is")
            if target in outcome.cuts:
                raise NotProvenError(f"it writes a chunk into the whole of {target.name}")
            before = self.outcomes[target]
            if before.state == outcome.state:
                continue
            if not isinstance(before.state, Local) and node not in self._expert_part:
                raise NotProvenError(
                    f"it makes {target.name}, which is {describe(before.state)}, "
                    f"{describe(outcome.state)}"
                )
            self.outcomes[target] = replace(before, state=outcome.state)

    def _without_sums(self) -> dict[Node, Region]:
        """The chunked nodes without those that can run once, on sums."""
        kept = dict(self._chunked.region_of)
        for node in reversed(self._chunked.region_of):
            if any(user in kept for user in node.users):
                continue
            if self._preserve_eager_order and node not in self._unproven:
                continue
            inputs = node.all_input_nodes
            found = {type(self.outcomes[source].state) for source in inputs if source in kept}
            reads_parts = any(source in self._chunked.entries for source in inputs)
            if Partial in found and found <= {Partial, Whole} and not reads_parts:
                del kept[node]
        return kept

    def _escapes(self, kept: Mapping[Node, Region]) -> Iterator[str]:
        """Each value that is read outside and cannot be made whole."""
        for node, region in kept.items():
            reader = next((user for user in node.users if user not in kept), None)
            if reader is None or node in self._unproven:
                continue
            state = self.outcomes[node].state
            if isinstance(state, (Local, tuple)) or value_of(node) is None:
                yield (
                    f"{node.name} ({node.target}) in {region} is {describe(state)}, and "
                    f"{reader.name} reads it outside"
                )


def _order(
    graph: Graph, region_of: Mapping[Node, Region], aliases: AliasClasses
) -> tuple[Unit, ...]:
    """Every region in one piece, and all else as close to its place as that allows."""
    first: dict[Unit, int] = {}
    sorter: graphlib.TopologicalSorter[Unit] = graphlib.TopologicalSorter()
    memory_order = _memory_order(graph, aliases)
    for index, node in enumerate(graph.nodes):
        unit = region_of.get(node, node)
        first.setdefault(unit, index)
        needed = (region_of.get(n, n) for n in (*node.all_input_nodes, *memory_order[node]))
        sorter.add(unit, *(other for other in needed if other is not unit))
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        circle = " before ".join(map(str, error.args[1]))
        raise GraphChunkingError([f"no order runs regions in one piece: {circle}"]) from error
    order: list[Unit] = []
    ready: list[tuple[int, Unit]] = []
    while sorter.is_active():
        for unit in sorter.get_ready():
            heapq.heappush(ready, (first[unit], unit))
        order.append(heapq.heappop(ready)[1])
        sorter.done(order[-1])
    return tuple(order)


def _memory_order(graph: Graph, aliases: AliasClasses) -> dict[Node, list[Node]]:
    """What must stay before each node because one of the two writes what the other reads."""
    before: dict[Node, list[Node]] = {}
    last: dict[Node, tuple[list[Node], list[Node]]] = {}  # writer of a memory, and readers since
    for node in graph.nodes:
        before[node] = []
        written = {aliases.class_of(target) for target in written_nodes(node)}
        for source in filter(aliases.is_written, node.all_input_nodes):
            memory = aliases.class_of(source)
            writer, readers = last.setdefault(memory, ([], []))
            before[node] += writer
            if memory in written:
                before[node] += readers
                last[memory] = ([node], [])
            else:
                readers.append(node)
    return before
