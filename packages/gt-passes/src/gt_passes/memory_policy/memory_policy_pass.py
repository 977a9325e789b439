"""The base of memory policies of one's own: a pass that says which results are kept.

It is registered and named like any pass. The recipe runs it where ``tag-saved-tensors`` would run,
and lets ``recompute-tagged`` carry out what it decided.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from gt_config.graph_kinds import STEP_GRAPHS, GraphKind
from gt_config.node_keys import Residency, ResidencyAnnotation
from gt_config.numerics import Numerics
from gt_passes.analysis.layer_names import LayerNames
from gt_passes.analysis.storages import Storages
from gt_passes.contract import GraphPass, PassContext, PassReport
from gt_passes.memory_policy.recomputability import Recomputability
from gt_passes.memory_policy.saved_tensor_policy import SavedTensorPolicy, is_gathered
from gt_trace.node_metadata import read_annotation, write_annotation


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPolicyPass(GraphPass):
    """Decides what is kept of the forward for the backward, by one question about each operator.

    *Before*::

        h = aten.mm(x, w)             # layers.0, and keeps(h) is True
        a = aten.silu(h)              # layers.0, and keeps(a) is False
        y = aten.mm(a, v)             # layers.0
        ...                           # the backward reads h and a

    *After*: the same nodes, with h tagged ``save`` and a tagged ``recompute``.

    A subclass is a frozen dataclass with a ``name``, registered by ``register_pass``; its fields
    are its options. It is the only memory policy of a recipe.

    *Refuses*: nothing; what must not be computed again (random operators, memory that is written to
    later, collectives) is saved, whatever ``keeps`` says, and so is everything outside layers.

    *Preserves numerics*: yes.
    """

    numerics: ClassVar[Numerics] = "bitwise"
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset({*STEP_GRAPHS, "STAGE"})

    layers: str = "layers.*"
    """Pattern of the names of the modules that are layers."""

    @abstractmethod
    def keeps(self, node: Node) -> bool:
        """Whether what an operator of the forward gives is kept rather than computed again.

        Asked of operators inside layers, whose results the backward reads or needs to compute what
        it reads. Where it is False, the result is computed again if that keeps fewer bytes.
        """

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Tag saved tensors; see the class."""
        storages = Storages(graph_module)
        recomputability = Recomputability(storages)
        policy = SavedTensorPolicy(layers=LayerNames(self.layers), keeps=self.keeps)
        decisions = policy.decide(storages, recomputability)
        changed = write_tags(tags_of(decisions, storages, recomputability))
        return PassReport(changed=changed, counts=counts_of(decisions))


def tags_of(
    decisions: Mapping[int, Residency], storages: Storages, recomputability: Recomputability
) -> dict[Node, Residency]:
    """Which tag each node gets: that of its storages, and recompute if they differ."""
    tags: dict[Node, Residency] = {}
    for node in storages.nodes:
        if node.op != "call_function" or node in recomputability.is_backward:
            continue
        held = storages.of(node)
        wanted = {decisions[storage] for storage in held if storage in decisions}
        if wanted:
            tags[node] = "recompute" if "recompute" in wanted else "save"
        elif held and not is_gathered(node) and all(is_gathered(storages.maker[s]) for s in held):
            # A view of a gathered parameter: the backward makes its own, so that the parameter can
            # be let go and gathered again in between.
            tags[node] = "recompute"
    return tags


def write_tags(tags: Mapping[Node, Residency]) -> bool:
    """Annotate the nodes; returns whether that said anything new."""
    changed = False
    for node, residency in tags.items():
        annotation = ResidencyAnnotation(residency=residency)
        if read_annotation(node, ResidencyAnnotation) != annotation:
            write_annotation(node, annotation)
            changed = True
    return changed


def counts_of(decisions: Mapping[int, Residency]) -> dict[str, int]:
    """How many tensors were decided to be saved, recomputed and offloaded."""
    counts = Counter(decisions.values())
    return {f"tensors_{each}": counts[each] for each in ("save", "recompute", "offload")}
