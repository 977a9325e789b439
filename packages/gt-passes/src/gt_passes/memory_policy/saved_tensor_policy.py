"""What becomes of each tensor between the forward that makes it and the backward that reads it.

Decided by storage, inside transformer layers only; what crosses the boundary of a layer is saved
for whoever reads it, so that a layer can be computed again from its own inputs. Within a layer the
backward names what it needs, and for each such value, the latest first, there are two ways to have
it: keep it, or keep what it is computed from. The cheaper in bytes wins, keeping it when they are
equal; with

    cost(v) = 0                                      if v is needed or kept in any case
    cost(v) = bytes(v)                               if v must not or shall not be computed again
    cost(v) = min(bytes(v), sum of cost(sources))    otherwise

as an upper bound of what the second way takes (values that several others are computed from count
more than once). Policies differ in what shall not be computed again. A minimum cut would find the
optimum and take more than linear time; torch's own partitioner does that for joint graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch.fx import Node

from gt_config import SavedOpSelector
from gt_config.node_keys import ChunkAnnotation, Residency
from gt_passes.analysis.fsdp_collective import fsdp_collective
from gt_passes.analysis.layer_names import LayerNames
from gt_passes.analysis.storages import Storages
from gt_passes.memory_policy.recomputability import Recomputability, operator_name
from gt_trace.node_metadata import module_fqn, phase_of, read_annotation

EXPENSIVE_OPERATORS: frozenset[str] = frozenset(
    {
        # matrix products
        "aten.mm",
        "aten.addmm",
        "aten.bmm",
        "aten.baddbmm",
        "aten.linear",
        "aten.convolution",
        "aten._grouped_mm",
        "aten._scaled_mm",
        "aten._scaled_grouped_mm",
        # attention
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "flex_attention",
        # the largest magnitude, by which low-precision products are scaled
        "aten.max",
        "aten.amax",
    }
)
"""What the policies selective and offload do not compute again. Collectives and random operators
come on top. The list is torchtitan's, for selective activation checkpointing
(``torchtitan/distributed/activation_checkpoint.py``), but for two things: every matrix product is
saved, not every second one as by ``every_second_product``, and of collectives all."""

_COUNTED_PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten.linear", "aten._scaled_mm"})


def is_one_of(operators: frozenset[str]) -> Callable[[Node], bool]:
    """Whether a node calls one of the operators, named without overload."""
    return lambda node: operator_name(node) in operators


def every_second_product(nodes: Iterable[Node], layers: LayerNames) -> frozenset[Node]:
    """The 2nd, 4th, ... dense product of each layer, as torchtitan's selective counts dense layers.

    Of experts it leaves the router out of the count, and this does not. Where a layer runs in
    chunks, each makes the same again.

    Args:
        nodes: of the forward, in execution order.
        layers: which layer a node belongs to; what lies in none is not counted.
    """
    whole: Counter[str] = Counter()
    of_chunk: Counter[tuple[str, int]] = Counter()
    found = []
    for node in nodes:
        layer = layers.layer_of(node)
        if layer is None or operator_name(node) not in _COUNTED_PRODUCTS:
            continue
        annotation = read_annotation(node, ChunkAnnotation)
        chunk = None if annotation is None else annotation.chunk_id
        if chunk is None:
            whole[layer] += 1
        else:
            of_chunk[layer, chunk] += 1
        number = whole[layer] + (0 if chunk is None else of_chunk[layer, chunk])
        if number % 2 == 0:
            found.append(node)
    return frozenset(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensorPolicy:
    """Decides which storages are saved and which are recomputed. Linear in the graph."""

    layers: LayerNames
    keeps: Callable[[Node], bool]
    """Whether what an operator gives is not computed again."""

    saved_selectors: tuple[SavedOpSelector, ...] = ()
    """Results that are kept whenever they are needed, whatever they would cost."""

    def decide(self, storages: Storages, recomputability: Recomputability) -> dict[int, Residency]:
        """``save`` or ``recompute`` for every storage that the backward needs of the forward.

        Placeholders, constants and gathered parameters are not among them.
        """
        return _Decision(self, storages, recomputability).run()


class _Decision:
    def __init__(
        self, policy: SavedTensorPolicy, storages: Storages, recomputability: Recomputability
    ) -> None:
        self._policy = policy
        self._storages = storages
        self._recomputability = recomputability
        self._layer = [policy.layers.layer_of(maker) for maker in storages.maker]
        self._needed = self._read_by_backward()
        self._is_kept = self._kept_in_any_case()
        self._may_recompute: dict[int, bool] = {}
        self._cost: dict[int, int] = {}

    def run(self) -> dict[int, Residency]:
        order = sorted(self._candidates(), key=self._recomputability.final_position)
        for storage in order:
            self._may_recompute[storage] = self._may_be_recomputed(storage)
            self._cost[storage] = self._cost_of(storage)
        decisions: dict[int, Residency] = {}
        for storage in reversed(order):
            if storage not in self._needed:
                continue
            if self._is_cheaper_to_recompute(storage):
                decisions[storage] = "recompute"
                self._needed |= self._recomputability.sources(storage)
            else:
                decisions[storage] = "save"
        return decisions

    def _candidates(self) -> Iterator[int]:
        """The storages that the forward or the loss makes, without gathered parameters."""
        for storage, maker in enumerate(self._storages.maker):
            if maker.op != "call_function" or maker in self._recomputability.is_backward:
                continue
            if phase_of(maker) == "optimizer" or is_gathered(maker):
                continue
            yield storage

    def _read_by_backward(self) -> dict[int, None]:
        backward = self._recomputability.is_backward
        needed: dict[int, None] = {}
        for node in self._storages.nodes:
            if node not in backward and not backward.isdisjoint(node.users):
                needed |= dict.fromkeys(self._storages.of(node))
        return needed

    def _kept_in_any_case(self) -> set[int]:
        """What is kept at no cost: inputs, and what the boundary of a layer or a user asks for."""
        kept = {
            storage
            for storage, maker in enumerate(self._storages.maker)
            if maker.op != "call_function"
        }
        backward = self._recomputability.is_backward
        for node in self._storages.nodes:
            if node in backward or node.op in ("placeholder", "get_attr"):
                continue
            layer = self._policy.layers.layer_of(node)
            for storage in self._storages.of_arguments(node):
                if self._layer[storage] != layer or layer is None:
                    kept.add(storage)
            if self._is_selected(node):
                kept.update(self._storages.of(node))
        return kept

    def _is_selected(self, node: Node) -> bool:
        if not self._policy.saved_selectors or node.op != "call_function":
            return False
        fqn, operator = module_fqn(node), str(node.target)
        return any(
            selector.matches(module_fqn=fqn, op=operator)
            for selector in self._policy.saved_selectors
        )

    def _cost_of(self, storage: int) -> int:
        """What it costs to have a storage that nothing else needs."""
        num_bytes = self._storages.num_bytes[storage]
        if not self._may_recompute[storage]:
            return num_bytes
        return min(num_bytes, self._cost_of_sources(storage))

    def _cost_of_sources(self, storage: int) -> int:
        return sum(
            # Gathered parameters are no candidates, and have no cost of their own.
            self._cost.get(source, self._storages.num_bytes[source])
            for source in self._recomputability.sources(storage)
            if source not in self._needed and source not in self._is_kept
        )

    def _may_be_recomputed(self, storage: int) -> bool:
        if self._layer[storage] is None or storage in self._is_kept:
            return False
        if self._recomputability.reason_against(storage) is not None:
            return False
        return not any(
            self._policy.keeps(node) or _changes_device(node)
            for node in self._recomputability.making(storage)
        )

    def _is_cheaper_to_recompute(self, storage: int) -> bool:
        if not self._may_recompute[storage]:
            return False
        # Equal, when a value is as large as the only thing it is computed from: no work is best.
        return self._cost_of_sources(storage) < max(self._storages.num_bytes[storage], 1)


def is_gathered(node: Node) -> bool:
    """Whether a node is part of gathering a parameter."""
    annotation = fsdp_collective(node)
    return annotation is not None and annotation.kind == "unshard"


def _changes_device(node: Node) -> bool:
    value = node.meta.get("val")
    device = getattr(value, "device", None)
    return device is not None and any(
        getattr(argument.meta.get("val"), "device", device) != device
        for argument in node.all_input_nodes
    )
