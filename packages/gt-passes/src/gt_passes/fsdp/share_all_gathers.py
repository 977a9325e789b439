"""Gather each FSDP parameter once.

A parameter that the model reads several times, tied embeddings above all, is unsharded each time it
is read. The gathered values are equal, so one gathering serves all readers.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch.fx import GraphModule, Node

from gt_config.graph_kinds import JOINT_GRAPHS, SHARD_AXES, STEP_GRAPHS, GraphKind, MeshAxis
from gt_config.numerics import Numerics
from gt_passes._torch_internals import OpOverload, has_declared_effect
from gt_passes.analysis.aliasing import AliasClasses, written_nodes
from gt_passes.analysis.collectives import is_pure_collective, is_wait
from gt_passes.analysis.forward_sweep import ForwardSweep
from gt_passes.analysis.fsdp_collective import fsdp_collective
from gt_passes.analysis.graph_constants import freeze_call
from gt_passes.contract import ChangeBounds, GraphPass, PassContext, PassReport, Refusal
from gt_passes.registry import register_pass
from gt_trace.node_metadata import phase_of

SharingScope = Literal["step", "phase"]


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class ShareAllGathers(GraphPass):
    """Merge equal FSDP unshard chains of one parameter, at the place of the first.

    Which nodes unshard a parameter is read from their annotation. Two chains are equal when they
    start at the same placeholder and apply the same operators with the same arguments: cast, pad,
    all-gather over one group, wait, slice, view. A chain that is equal only up to a point is shared
    up to that point.

    *Before*::

        g1 = all_gather_into_tensor(w, 8, "fsdp");  w1 = wait_tensor(g1)
        y = aten.embedding(w1, tokens)
        g2 = all_gather_into_tensor(w, 8, "fsdp");  w2 = wait_tensor(g2)
        z = aten.mm(y, aten.t(w2))

    *After*::

        g1 = all_gather_into_tensor(w, 8, "fsdp");  w1 = wait_tensor(g1)
        y = aten.embedding(w1, tokens)
        z = aten.mm(y, aten.t(w1))

    *Refuses*: to share across a write to the parameter; to share a gathered value that anything
    may write to; to make two outputs one. A parameter that is gathered in different ways (two
    dtypes, two groups) keeps one chain of each.

    *Preserves numerics*: yes. The gradients of the readers are reduced as before.
    """

    name: ClassVar[str] = "share-all-gathers"
    numerics: ClassVar[Numerics] = "bitwise"
    mesh_axes: ClassVar[frozenset[MeshAxis]] = SHARD_AXES
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset({*STEP_GRAPHS, "STAGE", *JOINT_GRAPHS})
    only_cleans_up: ClassVar[bool] = True

    scope: SharingScope = "step"
    """step: once in the whole step. phase: once in the forward and once in the backward, so that
    parameters that are gathered again for the backward stay free in between."""

    @property
    def bounds(self) -> ChangeBounds:
        """Fewer bytes; more memory, as the first gathered value lives until its last reader."""
        return ChangeBounds(collective_bytes_may_shrink=True, peak_memory_growth=None)

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Share all-gathers; see the class."""
        return _Sharing(graph_module, scope=self.scope).run()


class _Sharing:
    """One run of the pass: value numbering, of annotated nodes that hang on placeholders only."""

    def __init__(self, graph_module: GraphModule, *, scope: SharingScope) -> None:
        self._graph_module = graph_module
        self._sweep = ForwardSweep(graph_module.graph)
        self._aliases = AliasClasses(graph_module.graph)
        self._scope = scope
        self._steps: set[Node] = set()  # of all chains
        self._first_of: dict[Hashable, Node] = {}  # by call and by state of the memory it reads
        self._latest_of: dict[Hashable, Node] = {}  # by call only
        self._num_writes: dict[Node, int] = {}  # so far, by alias class
        self._refusals: list[Refusal] = []

    def run(self) -> PassReport:
        num_collectives = 0
        for node in self._sweep:
            self._count_writes(node)
            if not self._is_step(node):
                continue
            self._steps.add(node)
            sources = {source: source for source in node.all_input_nodes}
            call = (
                phase_of(node) if self._scope == "phase" else None,
                freeze_call(self._graph_module, node, sources),
            )
            state = (call, self._memory_state(node))
            first = self._first_of.setdefault(state, node)
            latest = self._latest_of.get(call)
            self._latest_of[call] = node
            if first is not node:
                reason = self._reason_not_to_share(first, node)
                if reason is None:
                    self._aliases.merge(first, node)
                    self._sweep.replace(node, by=first)
                    self._latest_of[call] = first
                    num_collectives += is_pure_collective(node)
                else:
                    self._refuse(node, reason)
            elif latest is not None:
                self._refuse(node, f"its input is written to after {latest.name}, which it equals")
        counts = {"all_gathers_shared": num_collectives, "nodes_shared": self._sweep.num_replaced}
        return PassReport.of(counts, self._refusals)

    def _count_writes(self, node: Node) -> None:
        for written in written_nodes(node):
            memory = self._aliases.class_of(written)
            self._num_writes[memory] = self._num_writes.get(memory, 0) + 1

    def _is_step(self, node: Node) -> bool:
        """Whether a node is part of an unshard chain that starts at a placeholder."""
        if node.op != "call_function":
            return False
        annotation = fsdp_collective(node)
        if annotation is None or annotation.kind != "unshard":
            return False
        sources = node.all_input_nodes
        if not sources or not all(s.op == "placeholder" or s in self._steps for s in sources):
            return False
        if node.target is operator.getitem or is_wait(node):
            return True
        return isinstance(node.target, OpOverload) and not has_declared_effect(node)

    def _memory_state(self, node: Node) -> tuple[int, ...]:
        """How often what the node reads has been written to."""
        return tuple(
            self._num_writes.get(self._aliases.class_of(source), 0)
            for source in node.all_input_nodes
        )

    def _reason_not_to_share(self, first: Node, node: Node) -> str | None:
        for candidate in (first, node):
            # Writes to the parameter itself are in the memory state.
            if self._aliases.is_written(candidate) and not self._aliases.holds_input(candidate):
                return f"{candidate.name}, one of the two equal values, is written to"
        if self._aliases.holds_output(first) and self._aliases.holds_output(node):
            return f"both it and its equal {first.name} are outputs"
        return None

    def _refuse(self, node: Node, reason: str) -> None:
        self._refusals.append(Refusal(node_name=node.name, reason=reason))
