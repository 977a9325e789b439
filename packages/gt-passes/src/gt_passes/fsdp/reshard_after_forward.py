"""Let go of gathered parameters after the forward, and gather them again for the backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from gt_config.graph_kinds import SHARD_AXES, GraphKind, MeshAxis
from gt_config.node_keys import PhaseAnnotation
from gt_passes.analysis.code_motion import CodeMotion
from gt_passes.analysis.fsdp_collective import fsdp_collective
from gt_passes.analysis.operator_effects import is_only_a_view
from gt_passes.contract import ChangeBounds, PassContext, PassReport, Refusal
from gt_passes.fsdp.fsdp_launches import FsdpLaunch
from gt_passes.fsdp.fsdp_pass import FsdpPass
from gt_passes.registry import register_pass
from gt_trace.node_metadata import phase_of, write_annotation

_ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardAfterForward(FsdpPass):
    """Give the backward its own gathering of each FSDP parameter, before its first reader.

    ZeRO stage 3, as ``reshard_after_forward`` of torch's ``fully_shard``. What hangs on a gathered
    value and is the same parameter still (a cast, a slice, a view) is made again with it.

    *Before*::

        w1 = wait_tensor(all_gather_into_tensor(w, 8, "fsdp"))
        t1 = t(w1)
        y = mm(x, t1)
        ...
        dx = mm(dy, t(t1))            # phase backward

    *After*::

        w1 = wait_tensor(all_gather_into_tensor(w, 8, "fsdp"))
        t1 = t(w1)
        y = mm(x, t1)
        ...
        w2 = wait_tensor(all_gather_into_tensor(w, 8, "fsdp"))
        t2 = t(w2)
        dx = mm(dy, t(t2))

    *Refuses*: parameters whose shard or gathered value is written to, or is an output.

    *Preserves numerics*: yes.
    """

    name: ClassVar[str] = "reshard-after-forward"
    mesh_axes: ClassVar[frozenset[MeshAxis]] = SHARD_AXES
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset({"STEP"})

    keep_last: bool = True
    """Keep what the forward gathers last (after the last block, or else the last block): the
    backward would gather it again at once."""

    @property
    def bounds(self) -> ChangeBounds:
        """Every byte at most twice, for less memory in between."""
        return ChangeBounds(collective_bytes_growth=1.0, peak_memory_growth=None)

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Gather again for the backward; see the class."""
        graph = graph_module.graph
        found = self.find_launches(graph, _ALL_GATHER)
        forward = [
            each
            for each in found.launches
            if each.kind == "unshard" and each.direction == "forward"
        ]
        if self.keep_last and forward:
            last = forward[-1].block
            forward = [each for each in forward if each.block != last]
        resharding = _Resharding(graph)
        refusals = list(found.refusals)
        num_resharded = 0
        for launch in forward:
            outcome = resharding.gather_again(launch)
            if isinstance(outcome, str):
                refusals.append(Refusal(node_name=launch.launch.name, reason=outcome))
            else:
                num_resharded += outcome
        return PassReport.of({"gathered_again": num_resharded}, refusals)


class _Resharding:
    """One run of the pass."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._motion = CodeMotion(graph)

    def gather_again(self, launch: FsdpLaunch) -> bool | str:
        """Whether the backward read the gathered value and now has its own, or why it must not."""
        parameter = self._same_parameter(launch.wait)
        readers = self._backward_readers(parameter)
        if not readers:
            return False
        before = list(self._shard_chain(launch))
        for node in (*before, launch.launch, *parameter):
            reason = self._motion.reason_not_to_move(node)
            if reason is not None:
                return reason
        if any(user.op == "output" for node in parameter for user in node.users):
            return "the gathered value is an output"
        if any(phase_of(user) is None for node in parameter for user in node.users):
            return "a reader of the gathered value belongs to no phase"
        copies: dict[Node, Node] = {}

        def current(node: Node) -> Any:
            return copies.get(node, node)

        needed = self._needed(parameter, readers)
        with self._graph.inserting_before(readers[0]):
            for node in (*before, launch.launch, *needed):
                copy = self._graph.create_node(
                    node.op,
                    node.target,
                    map_arg(node.args, current),
                    map_arg(node.kwargs, current),
                    name=f"{node.name}_again",
                )
                copy.meta = dict(node.meta)
                write_annotation(copy, PhaseAnnotation(phase="backward"))
                copies[node] = copy
        for reader in readers:
            reader.args = map_arg(reader.args, current)
            reader.kwargs = map_arg(reader.kwargs, current)
        return True

    def _shard_chain(self, launch: FsdpLaunch) -> Iterator[Node]:
        """What is done to the shard before it is gathered: a cast, padding; in order."""
        stack, found = [launch.input], set()
        while stack:
            node = stack.pop()
            if node in found or node.op == "placeholder":
                continue
            if fsdp_collective(node) is None:
                continue
            found.add(node)
            stack.extend(node.all_input_nodes)
        return iter(sorted(found, key=self._motion.position.__getitem__))

    def _same_parameter(self, wait: Node) -> list[Node]:
        """The gathered value and what is still the parameter, made in the forward; in order."""
        found: dict[Node, None] = {wait: None}
        stack = [wait]
        while stack:
            for user in stack.pop().users:
                if user in found or user.op == "output" or phase_of(user) == "backward":
                    continue
                annotation = fsdp_collective(user)
                unshards = annotation is not None and annotation.kind == "unshard"
                if unshards or is_only_a_view(user):
                    found[user] = None
                    stack.append(user)
        return sorted(found, key=self._motion.position.__getitem__)

    def _backward_readers(self, parameter: Iterable[Node]) -> list[Node]:
        readers = {
            user: None for node in parameter for user in node.users if phase_of(user) == "backward"
        }
        return sorted(readers, key=self._motion.position.__getitem__)

    def _needed(self, parameter: Iterable[Node], readers: Iterable[Node]) -> list[Node]:
        """What of ``parameter`` the readers read, and what that is made of."""
        whole = set(parameter)
        stack = [n for reader in readers for n in reader.all_input_nodes if n in whole]
        needed: dict[Node, None] = {}
        while stack:
            node = stack.pop()
            if node not in needed:
                needed[node] = None
                stack.extend(n for n in node.all_input_nodes if n in whole)
        return sorted(needed, key=self._motion.position.__getitem__)
