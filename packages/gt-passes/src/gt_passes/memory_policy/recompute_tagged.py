"""Compute again in the backward what is tagged for it, so that the forward can let go of it.

The transformation is rematerialization, as in "Training Deep Nets with Sublinear Memory Cost"
(Chen et al., 2016), on the graph of a whole step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument, map_arg

from gt_config.graph_kinds import STEP_GRAPHS, GraphKind
from gt_config.node_keys import ChunkAnnotation, PhaseAnnotation, ResidencyAnnotation
from gt_config.numerics import Numerics
from gt_passes.analysis.collectives import is_wait
from gt_passes.analysis.liveness import estimate_peak_bytes, peak_bytes_of
from gt_passes.analysis.storages import Storages
from gt_passes.contract import ChangeBounds, GraphPass, PassContext, PassReport, Refusal
from gt_passes.memory_policy.recomputability import Recomputability
from gt_passes.registry import register_pass
from gt_trace.node_metadata import read_annotation, remove_annotation, write_annotation

_RECOMPUTE = ResidencyAnnotation(residency="recompute")
_SAVE = ResidencyAnnotation(residency="save")


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeTagged(GraphPass):
    """Make tagged values anew in the backward, each right before the first node that needs it.

    *Before*, with a tagged ``recompute``::

        h = aten.mm(x, w)
        a = aten.silu(h)                       # read by the forward and by the backward
        ...
        grad_v = aten.mm(aten.t(a), grad_y)    # phase backward

    *After*::

        h = aten.mm(x, w)
        a = aten.silu(h)                       # read by the forward only
        ...
        a_recomputed = aten.silu(h)            # phase backward
        grad_v = aten.mm(aten.t(a_recomputed), grad_y)

    Nodes of the forward that only the backward read move to the backward. A copy keeps every
    annotation of what it stands for, but that its phase is backward and that it is not tagged.

    *Refuses*, and tags ``save``: to recompute what ``recomputability`` rules out (random operators,
    unknown operators, memory that is written to later, ...); and to recompute anything if that
    would raise the estimated peak memory, of as many microbatches as the context says are live.

    *Preserves numerics*: yes. The same operators read the same bits.
    """

    name: ClassVar[str] = "recompute-tagged"
    numerics: ClassVar[Numerics] = "bitwise"
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset({*STEP_GRAPHS, "STAGE"})

    recompute_collectives: bool = False
    """Whether tagged collectives, other than FSDP's, may run a second time."""

    @property
    def bounds(self) -> ChangeBounds:
        """No more memory. Every collective runs at most twice where that is allowed at all."""
        growth = 1.0 if self.recompute_collectives else 0.0
        return ChangeBounds(collective_bytes_growth=growth)

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Recompute what is tagged; see the class."""
        if not any(map(_is_tagged, graph_module.graph.nodes)):
            return PassReport.of({})
        recomputation = _Recomputation(
            graph_module, recompute_collectives=self.recompute_collectives
        )
        if not recomputation.late_reads:
            return PassReport.of({}, recomputation.refusals)
        num_live = context.num_live_microbatches
        before = peak_bytes_of(recomputation.storages, num_live_microbatches=num_live)
        recomputation.apply()
        after = estimate_peak_bytes(graph_module, num_live_microbatches=num_live)
        if after > before:
            recomputation.undo()
            (first, *_) = recomputation.late_reads
            reason = f"recomputing would raise the estimated peak from {before} to {after} bytes"
            refusal = Refusal(node_name=first.name, reason=reason)
            return PassReport.of({}, (*recomputation.refusals, refusal))
        num_moved = recomputation.erase_unused()
        counts = {"recomputed": len(recomputation.copies) - num_moved, "moved": num_moved}
        return PassReport.of(counts, recomputation.refusals)


class _Recomputation:
    """One run of the pass."""

    def __init__(self, graph_module: GraphModule, *, recompute_collectives: bool) -> None:
        self._graph: Graph = graph_module.graph
        self.storages = storages = Storages(graph_module)  # of the graph as it was
        recomputability = Recomputability(storages, recompute_collectives=recompute_collectives)
        self._position = {node: place for place, node in enumerate(storages.nodes)}
        self._tagged, self.refusals = _split_tagged(storages, recomputability)
        self.late_reads: tuple[Node, ...] = tuple(
            node
            for node in storages.nodes
            if node in recomputability.is_backward
            and any(argument in self._tagged for argument in node.all_input_nodes)
        )
        """Nodes of the backward that read what is tagged."""

        self.copies: dict[Node, Node] = {}
        """What stands for a node of the forward."""

        self._old_arguments: list[tuple[Node, tuple[Argument, ...], dict[str, Argument]]] = []

    def apply(self) -> None:
        """Make the copies, and let the backward read them."""
        for reader in self.late_reads:
            self._old_arguments.append((reader, reader.args, reader.kwargs))
            with self._graph.inserting_before(reader):
                self._copy_what_is_missing(reader)
            reader.args = map_arg(reader.args, self._current)
            reader.kwargs = map_arg(reader.kwargs, self._current)

    def undo(self) -> None:
        """Take the copies out again, and tag what they stood for as saved."""
        for reader, args, kwargs in self._old_arguments:
            reader.args, reader.kwargs = args, kwargs
        for copy in reversed(self.copies.values()):
            self._graph.erase_node(copy)
        self.copies.clear()
        for node in self._tagged:
            write_annotation(node, _SAVE)

    def erase_unused(self) -> int:
        """Remove the nodes of the forward that nobody reads any more; returns how many."""
        unused = [node for node in self.copies if not node.users]
        num_erased = 0
        while unused:
            node = unused.pop()
            sources = node.all_input_nodes
            self._graph.erase_node(node)
            num_erased += 1
            unused += [source for source in sources if source in self.copies and not source.users]
        return num_erased

    def _copy_what_is_missing(self, reader: Node) -> None:
        """Copy what a node reads and what that is made of, in the order of the forward.

        So a collective that the forward launches before it needs it is launched early again.
        """
        missing: set[Node] = set()
        stack = [reader]
        while stack:
            for source in stack.pop().all_input_nodes:
                if source in self._tagged and source not in self.copies and source not in missing:
                    missing.add(source)
                    stack.append(source)
        for node in sorted(missing, key=self._position.__getitem__):
            self.copies[node] = self._one_copy(node)

    def _one_copy(self, node: Node) -> Node:
        copy = self._graph.create_node(
            node.op,
            node.target,
            map_arg(node.args, self._current),
            map_arg(node.kwargs, self._current),
            name=f"{node.name}_recomputed",
        )
        copy.meta = dict(node.meta)
        remove_annotation(copy, ResidencyAnnotation)
        write_annotation(copy, PhaseAnnotation(phase="backward"))
        chunk = read_annotation(copy, ChunkAnnotation)
        if chunk is not None:
            write_annotation(copy, replace(chunk, direction="backward"))
        return copy

    def _current(self, node: Node) -> Any:
        return self.copies.get(node, node)


def _is_tagged(node: Node) -> bool:
    return read_annotation(node, ResidencyAnnotation) == _RECOMPUTE


def _split_tagged(
    storages: Storages, recomputability: Recomputability
) -> tuple[set[Node], tuple[Refusal, ...]]:
    """The nodes to recompute, and those tagged for it that must not be."""
    tagged = {
        node
        for node in storages.nodes
        if node not in recomputability.is_backward and _is_tagged(node)
    }
    reasons: dict[int, str | None] = {}

    def reason_against(storage: int) -> str | None:
        """Why a storage must not be made again."""
        if storage not in reasons:
            reason = recomputability.reason_against(storage)
            making = recomputability.making(storage)
            alone = next((node.name for node in making if node not in tagged), None)
            if reason is None and alone is not None:
                reason = f"it is made together with {alone}, which is not tagged"
            reasons[storage] = reason
        return reasons[storage]

    accepted: set[Node] = set()
    refusals = []
    for node in storages.nodes:
        if node not in tagged:
            continue
        reason = recomputability.reason_against_operator(node)
        for storage in dict.fromkeys(storages.of(node)):
            # Other views are free to copy; they read whatever memory their base has.
            if reason is None and (is_wait(node) or node in recomputability.making(storage)):
                reason = reason_against(storage)
        if reason is None:
            accepted.add(node)
        else:
            write_annotation(node, _SAVE)
            refusals.append(Refusal(node_name=node.name, reason=reason))
    return accepted, tuple(refusals)
