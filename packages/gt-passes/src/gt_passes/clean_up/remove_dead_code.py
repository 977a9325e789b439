"""Remove what nothing uses.

A captured step holds much that nobody reads: the logits behind a fused loss, the halves of tuples,
gathered parameters whose gradient needs no weight. Later passes would schedule and count it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch.fx import GraphModule, Node

from gt_config.graph_kinds import EVERY_GRAPH, GraphKind
from gt_config.numerics import Numerics
from gt_passes._torch_internals import OpOverload, has_declared_effect
from gt_passes.analysis.aliasing import has_unknown_effects, written_nodes
from gt_passes.analysis.collectives import is_pure_collective, is_wait, raw_results
from gt_passes.analysis.fsdp_collective import fsdp_collective
from gt_passes.contract import ChangeBounds, GraphPass, PassContext, PassReport, Refusal
from gt_passes.registry import register_pass

DeadCollectives = Literal["keep", "remove_unshards"]


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveDeadCode(GraphPass):
    """Remove nodes that have neither a user nor an effect, and what only they used.

    *Before*::

        y = aten.mm(x, w)
        z = aten.relu(y)            # nothing reads z
        r = aten.rand([2])          # nothing reads r, but it advances the generator
        return y

    *After*::

        y = aten.mm(x, w)
        r = aten.rand([2])
        return y

    *Refuses* (keeps): placeholders; operators that write to an argument; operators that draw random
    numbers, dead or not, because removing one shifts every later draw; asserts and constraints on
    sizes; operators that return nothing; anything whose effects are not known, such as a custom
    function without a schema. Dead collectives are kept and reported, unless they unshard FSDP
    parameters: whether another rank uses the result cannot be seen from here (think of a metric
    that only rank 0 logs), and a collective that some ranks skip hangs the others. The unshards of
    FSDP are the same on every rank of its mesh axis.

    *Preserves numerics*: yes, and the random number stream.
    """

    name: ClassVar[str] = "remove-dead-code"
    numerics: ClassVar[Numerics] = "bitwise"
    runs_on: ClassVar[frozenset[GraphKind]] = EVERY_GRAPH
    only_cleans_up: ClassVar[bool] = True

    dead_collectives: DeadCollectives = "remove_unshards"
    """What happens to collectives whose result nobody reads. keep: none is removed.
    remove_unshards: those annotated as FSDP unshard are."""

    @property
    def bounds(self) -> ChangeBounds:
        """Bytes go away with the unshards that do."""
        return ChangeBounds(
            collective_bytes_may_shrink=self.dead_collectives != "keep", only_removes=True
        )

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Remove dead nodes; see the class."""
        num_removed = num_collectives = 0
        refusals: list[Refusal] = []
        # Backwards, so that a node is judged after all its users.
        for node in reversed(graph_module.graph.nodes):
            if node.users:
                continue
            if is_wait(node):
                refusal = self._refusal(node)
                if refusal is not None:
                    refusals.append(refusal)
                    continue
            elif _has_effect(node):
                continue
            num_collectives += is_pure_collective(node)
            graph_module.graph.erase_node(node)
            num_removed += 1
        counts = {"removed": num_removed, "collectives_removed": num_collectives}
        return PassReport.of(counts, refusals[::-1])

    def _refusal(self, wait: Node) -> Refusal | None:
        """Why a wait that nobody reads must stay, or None where it may go."""
        launches = {_launch_of(argument) for argument in wait.all_input_nodes}
        if not all(map(is_pure_collective, launches)):
            return Refusal(
                node_name=wait.name, reason="a dead wait on something other than a pure collective"
            )
        if any(len(result.users) > 1 for launch in launches for result in raw_results(launch)):
            return None  # another wait keeps the collective
        annotations = [fsdp_collective(launch) for launch in launches]
        unshards = all(found is not None and found.kind == "unshard" for found in annotations)
        if unshards and self.dead_collectives == "remove_unshards":
            return None
        return Refusal(
            node_name=wait.name,
            reason="nobody reads this collective here, but another rank may, and would hang",
        )


def _has_effect(node: Node) -> bool:
    """Whether a node does something besides making its result."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "get_attr":
        return False
    if has_unknown_effects(node):
        return True
    # A pure function without a result would be pointless: it is there for an effect.
    if isinstance(node.target, OpOverload) and not node.target._schema.returns:
        return True
    return has_declared_effect(node) or any(True for _ in written_nodes(node))


def _launch_of(argument: Node) -> Node:
    """The launch behind the argument of a wait: itself, or the tuple that it is an item of."""
    source = argument.args[0] if argument.target is operator.getitem else argument
    return source if isinstance(source, Node) else argument
