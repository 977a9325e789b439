"""Which parts of a graph are regions for Inductor: chosen nodes, gathered into runs.

A node is chosen because it is FlexAttention, because a caller tagged it in the way that PyTorch's
``torch.fx.passes.regional_inductor`` reads::

    with torch.fx.traceback.annotate({"compile_with_inductor": {"inductor_configs": {...}}}):
        ...

because its module matches a pattern, or because memory is all that bounds it. Chosen nodes of one
kind become one region as long as nothing between them depends on the region: then all of them can
run at the place of the last. A collective, a wait, or anything with an effect ends every region
before it, so that communication keeps its place; but what memory bounds may run behind
communication that does not depend on it, which else would cut the norm that it stands in. What a
compiler has had already stays as it is.

The runs are ours and not ``CapabilityBasedPartitioner``'s, which regional_inductor uses: that one
looks at data dependencies only, and so moves nodes across writes, waits and launches, and its cost
grows with the square of the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from gt_passes._torch_internals import (
    HigherOrderOperator,
    OpOverload,
    has_declared_effect,
    value_of,
)
from gt_passes.analysis.aliasing import AliasClasses, written_nodes
from gt_passes.analysis.collectives import is_collective, is_wait
from gt_passes.analysis.fsdp_collective import fsdp_collective
from gt_passes.analysis.operator_effects import draws_random_numbers, is_barrier, is_only_a_view
from gt_passes.analysis.outlined_region import run_region
from gt_passes.analysis.tensor_signature import is_symbolic, signature
from gt_passes.contract import Refusal
from gt_trace.node_metadata import module_fqn, node_annotations, phase_of

_TAG = "compile_with_inductor"
_FLEX_ATTENTION = frozenset({"flex_attention", "flex_attention_backward"})
_MEMORY_BOUND = frozenset(
    {
        *("_to_copy", "clone", "cat", "sum", "mean", "amax", "amin", "max", "var", "var_mean"),
        *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
        *("native_layer_norm", "native_layer_norm_backward"),
        *("_fused_rms_norm", "_fused_rms_norm_backward"),
    }
)
"""Copies and reductions that Inductor fuses, besides the operators that torch tags pointwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlan:
    """One region to be."""

    nodes: tuple[Node, ...]
    """In an order of execution."""

    anchor: Node
    """The one of them at whose place all can run."""

    options: Mapping[str, object]
    """What Inductor is to be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionChoice:
    """Regions in execution order, and chosen nodes that can be in none."""

    regions: tuple[RegionPlan, ...]
    refusals: tuple[Refusal, ...]


def plan_regions(
    graph: Graph, *, module_patterns: Sequence[str] = (), memory_bound: bool = False
) -> RegionChoice:
    """Choose nodes and gather them into regions.

    Args:
        graph: with fake values, annotated as gt-trace does.
        module_patterns: fully qualified names, as ``layers.*.feed_forward``; an asterisk stands for
            any characters within one component, and modules inside a matched one match too.
        memory_bound: whether elementwise operators, reductions and copies are chosen too, those of
            one layer and phase together: norms, activation functions, casts, sums.
    """
    patterns = [pattern.split(".") for pattern in module_patterns]

    def kind(node: Node) -> Kind:
        chosen = _chosen_kind(node, patterns)
        if chosen is _UNCHOSEN and memory_bound and _is_memory_bound(node):
            return _MemoryBound(_layer_of(module_fqn(node)), phase_of(node)), {}
        return chosen

    return _Planner(graph, kind).plan()


def plan_flex_attention(graph: Graph, *, options: Mapping[str, object]) -> RegionChoice:
    """Make every FlexAttention operator a region of its own, and choose nothing else.

    Args:
        graph: with fake values, annotated as gt-trace does.
        options: what Inductor is to be told.
    """

    def kind(node: Node) -> Kind:
        return (("flex_attention", node), options) if is_flex_attention(node) else _UNCHOSEN

    return _Planner(graph, kind).plan()


Kind = tuple[Hashable | None, Mapping[str, object]]
"""What the nodes of one region have in common, and what Inductor is to be told; None for a node
that nobody chose."""

_UNCHOSEN: Kind = (None, {})


class _MemoryBound(NamedTuple):
    """The kind of the nodes of one layer and phase that memory bounds."""

    layer: str
    phase: str | None


class _Planner:
    def __init__(self, graph: Graph, kind_of: Callable[[Node], Kind]) -> None:
        self._nodes = list(graph.nodes)
        self._kind_of = kind_of
        self._aliases = AliasClasses(graph)
        self._refusals: dict[Node, str] = {}
        self._kinds: dict[Node, Hashable] = {}
        self._options: dict[Node, Mapping[str, object]] = {}

    def plan(self) -> RegionChoice:
        for node in self._nodes:
            self._choose(node)
        runs = list(self._runs())
        # What is written to must be wholly inside one region, or its readers elsewhere would not
        # see the write. Taking such nodes out may cut other runs, so look again.
        while cut := list(self._written_across_borders(runs)):
            for node in cut:
                self._leave_out(node, "it shares memory that is written to outside its region")
            runs = list(self._runs())
        positions = {node: position for position, node in enumerate(self._nodes)}
        regions = [
            RegionPlan(nodes=tuple(run), anchor=anchor, options=self._options[anchor])
            for run in runs
            for anchor in [next(node for node in reversed(run) if not _is_item(node))]
            if self._is_worth_it(run)
        ]
        return RegionChoice(
            regions=tuple(sorted(regions, key=lambda region: positions[region.anchor])),
            refusals=tuple(
                Refusal(node_name=node.name, reason=self._refusals[node])
                for node in self._nodes
                if node in self._refusals
            ),
        )

    def _choose(self, node: Node) -> None:
        if node.op != "call_function" or is_collective(node) or is_wait(node):
            return
        if node.target is run_region:
            return  # a compiler has had it
        if fsdp_collective(node) is not None:
            return  # the views around a collective stay with it
        if _is_item(node):
            return  # goes with what it is an item of
        kind, options = self._kind_of(node)
        if kind is None:
            return
        self._kinds[node], self._options[node] = kind, options
        reason = self._reason_against(node)
        if reason is not None:
            self._leave_out(node, reason)

    def _reason_against(self, node: Node) -> str | None:
        if is_barrier(node):
            return f"nothing is known of what {_name(node)} does"
        if draws_random_numbers(node):
            return "it draws random numbers"
        written = list(written_nodes(node))
        if any(self._aliases.holds_input(argument) for argument in written):
            return "it writes to an input of the graph"
        if not written and has_declared_effect(node):
            return f"{_name(node)} has an effect besides its result"
        values = [value_of(node), *(value_of(argument) for argument in node.all_input_nodes)]
        if any(isinstance(v, torch.SymInt) or is_symbolic(signature(v)) for v in values):
            return "its sizes depend on data"
        return None

    def _leave_out(self, node: Node, reason: str) -> None:
        kind = self._kinds.pop(node)
        if not isinstance(kind, _MemoryBound):  # nobody asked for a certain one of those
            self._refusals[node] = reason

    def _is_worth_it(self, run: Sequence[Node]) -> bool:
        """Whether a run computes anything; and where memory bounds it, fuses anything."""
        num_operators = sum(not is_only_a_view(node) for node in run)
        return num_operators > isinstance(self._kinds[run[0]], _MemoryBound)

    def _runs(self) -> Iterator[list[Node]]:
        """Chosen nodes, gathered. Each list is in execution order."""
        open_runs: dict[Hashable, list[Node]] = {}
        kind_of: dict[Node, Hashable] = {}  # of the nodes in open runs

        def close(kind: Hashable) -> list[Node]:
            run = open_runs.pop(kind)
            for member in run:
                del kind_of[member]
            return run

        for node in self._nodes:
            if node in kind_of:
                continue  # an item, which went with its source
            kind = self._kinds.get(node)
            if isinstance(kind, _MemoryBound) and is_only_a_view(node):
                # Of a value outside the run it would only tie the run to the view's other users.
                in_run = any(kind_of.get(argument) == kind for argument in node.all_input_nodes)
                kind = kind if in_run else None
            if kind is None and (is_collective(node) or is_wait(node) or _has_effect(node)):
                ended = [
                    other
                    for other in open_runs
                    if not (isinstance(other, _MemoryBound) and _only_reads(node))
                ]
                for other in ended:
                    yield close(other)
            for argument in node.all_input_nodes:
                other = kind_of.get(argument)
                if other is not None and other != kind:
                    yield close(other)  # the region must have run before this node
            if kind is not None:
                for member in (node, *_items(node)):
                    open_runs.setdefault(kind, []).append(member)
                    kind_of[member] = kind
        yield from open_runs.values()

    def _written_across_borders(self, runs: Sequence[Sequence[Node]]) -> Iterator[Node]:
        """The nodes in regions whose memory is written to, and not by and for one region alone."""
        run_of = {node: number for number, run in enumerate(runs) for node in run}
        runs_of_memory: dict[Node, set[int | None]] = {}
        for node in self._nodes:
            if self._aliases.is_written(node):
                memory = self._aliases.class_of(node)
                runs_of_memory.setdefault(memory, set()).add(run_of.get(node))
        for node in run_of:
            if (
                node in self._kinds
                and self._aliases.is_written(node)
                and len(runs_of_memory[self._aliases.class_of(node)]) > 1
            ):
                yield node


def _chosen_kind(node: Node, patterns: Sequence[Sequence[str]]) -> Kind:
    """What chose a node: its tag, a matched module, or that it is FlexAttention."""
    if _TAG in node_annotations(node):
        tag: Any = node_annotations(node)[_TAG]
        tag = tag if isinstance(tag, Mapping) else {}
        options = dict(tag.get("inductor_configs") or {})
        region = tag.get("inductor_region")
        return ("tag", region, repr(sorted(options.items())), phase_of(node)), options
    instance = _matched_module(module_fqn(node), patterns)
    if instance is not None:
        return ("module", instance, phase_of(node)), {}
    if is_flex_attention(node):
        return ("flex_attention", node), {}
    return _UNCHOSEN


def _is_memory_bound(node: Node) -> bool:
    """Whether Inductor can fuse a node with others: elementwise, a reduction, a copy, a view.

    Complex numbers it leaves to eager kernels, and numbers of one element are not worth a kernel.
    """
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return False
    values = [value_of(node), *map(value_of, node.all_input_nodes)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if len({tensor.device for tensor in tensors}) != 1 or any(t.is_complex() for t in tensors):
        return False
    name = target._schema.name.partition("::")[2]
    return torch.Tag.pointwise in target.tags or name in _MEMORY_BOUND or is_only_a_view(node)


def _layer_of(fqn: str) -> str:
    """The part of a module's name up to its first number, as ``layers.3``; else its first word."""
    components = fqn.split(".")
    number = next((at for at, each in enumerate(components) if each.isdecimal()), 0)
    return ".".join(components[: number + 1])


def _matched_module(fqn: str, patterns: Sequence[Sequence[str]]) -> tuple[str, ...] | None:
    components = fqn.split(".")
    for pattern in patterns:
        if len(components) >= len(pattern) and all(map(fnmatchcase, components, pattern)):
            return tuple(components[: len(pattern)])
    return None


def _has_effect(node: Node) -> bool:
    """Whether the order between a node and its neighbours matters beyond data dependencies."""
    if node.op != "call_function":
        return False
    return is_barrier(node) or draws_random_numbers(node) or has_declared_effect(node)


def _only_reads(node: Node) -> bool:
    """Whether a node is communication that writes nothing but its result."""
    return (is_collective(node) or is_wait(node)) and next(iter(written_nodes(node)), None) is None


def _is_item(node: Node) -> bool:
    return node.target is operator.getitem


def _items(node: Node) -> Iterator[Node]:
    """The items of a result that is a tuple, and theirs; they run with it, wherever they stand."""
    for user in node.users:
        if _is_item(user):
            yield user
            yield from _items(user)


def is_flex_attention(node: Node) -> bool:
    """Whether a node is FlexAttention, forward or backward."""
    return isinstance(node.target, HigherOrderOperator) and str(node.target) in _FLEX_ATTENTION


def _name(node: Node) -> str:
    if isinstance(node.target, OpOverload):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))
