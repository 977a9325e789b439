"""What a graph has in each layer, for whoever looks at a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from gt_passes.analysis.collectives import is_collective, launch_bytes, waits_of
from gt_passes.analysis.symbol_sizes import SymbolSizes
from gt_passes.memory_policy.residency_table import residency_by_layer
from gt_passes.simulation.work import OpKind, work_of
from gt_trace import module_fqn, phase_of

LayerNumbers = dict[str, dict[str, int]]
"""By layer, in the order of the graph: numbers by what they are of."""

_KINDS: dict[OpKind, str] = {
    "matmul": "matrix products",
    "grouped_matmul": "matrix products",
    "attention_forward": "attention",
    "attention_backward": "attention",
    "streaming": "elementwise",
    "irregular": "gathers and scatters",
    "host_scalar": "host copies",
    "host_copy": "host copies",
    "collective": "collectives",
    "wait": "waits",
    "view": "views",
    "none": "views",
}
_HEAVY = frozenset({"matrix products", "attention"})
_RESIDENCIES = {"save": "saved", "recompute": "recomputed", "offload": "offloaded"}


def layer_counts(graph_module: GraphModule) -> LayerNumbers:
    """Count what computes in the forward, what does elsewhere, and collectives."""
    counts: dict[str, Counter[str]] = {}
    for node in graph_module.graph.nodes:
        if _computes(node):
            kind = "collectives" if is_collective(node) else phase_of(node) or "no phase"
            counts.setdefault(_layer_of(node), Counter())[kind] += 1
    return {layer: dict(found) for layer, found in counts.items()}


def layer_summary(graph_module: GraphModule) -> LayerNumbers:
    """Count operators by kind, and bytes by what becomes of them.

    Of collectives also their bytes, and how many have a matrix product or attention between their
    launch and their wait; of tensors that the forward leaves to the backward, where a graph has
    both, the bytes that are saved, recomputed and offloaded.
    """
    counts: dict[str, Counter[str]] = {}
    kinds: dict[object, str] = {}
    sizes = SymbolSizes()
    num_heavy: dict[Node, int] = {}
    collectives: list[Node] = []
    heavy = 0
    for node in filter(_computes, graph_module.graph.nodes):
        of_layer = counts.setdefault(_layer_of(node), Counter())
        call = node.target, _devices_of(node)
        if call not in kinds:
            kinds[call] = _KINDS[work_of(node, sizes).kind]
        kind = kinds[call]
        of_layer[kind] += 1
        heavy += kind in _HEAVY
        num_heavy[node] = heavy
        if kind == "collectives":
            collectives.append(node)
            of_layer["collective bytes"] += launch_bytes(node)
    for launch in collectives:
        is_hidden = any(num_heavy[wait] > num_heavy[launch] for wait in waits_of(launch))
        counts[_layer_of(launch)]["collectives behind products"] += is_hidden
    for layer, name, num_bytes in _bytes_left_to_the_backward(graph_module):
        counts.setdefault(layer, Counter())[name] += num_bytes
    return {layer: dict(+found) for layer, found in counts.items()}


def _bytes_left_to_the_backward(graph_module: GraphModule) -> Iterator[tuple[str, str, int]]:
    nodes = graph_module.graph.nodes
    has_both = any(phase_of(node) == "forward" for node in nodes) and any(
        phase_of(node) == "backward" for node in reversed(nodes)
    )
    if not has_both:
        return
    for row in residency_by_layer(graph_module, layers=_layer_of):
        for residency, num_bytes in row.num_bytes.items():
            yield row.layer, f"{_RESIDENCIES[residency]} bytes", num_bytes


def _devices_of(node: Node) -> frozenset[str]:
    """Where operands and results are: a copy between two of them is another kind of work."""
    values = pytree.tree_leaves([each.meta.get("val") for each in (node, *node.all_input_nodes)])
    return frozenset(each.device.type for each in values if isinstance(each, Tensor))


def _computes(node: Node) -> bool:
    return node.op not in ("placeholder", "get_attr", "output")


def _layer_of(node: Node) -> str:
    """The layer of a node; of one that belongs to no module its phase, in brackets."""
    return _layer(module_fqn(node)) or f"({phase_of(node) or 'no phase'})"


@cache
def _layer(fqn: str) -> str:
    """A module up to the first number in its name, or its whole name: ``layers.3``, ``norm``."""
    parts = fqn.split(".")
    numbered = (place for place, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[: next(numbered, len(parts)) + 1])
