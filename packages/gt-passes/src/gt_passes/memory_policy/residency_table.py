"""What is kept of the forward for the backward, by layer, as data and as a table."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from gt_config.node_keys import Residency, ResidencyAnnotation
from gt_passes.analysis.host_copies import is_host_copy
from gt_passes.analysis.layer_names import LayerNames
from gt_passes.analysis.storages import Storages
from gt_passes.memory_policy.recomputability import Recomputability, operator_name
from gt_passes.memory_policy.saved_tensor_policy import is_gathered
from gt_trace.node_metadata import phase_of, read_annotation

_OFFLOAD = ResidencyAnnotation(residency="offload")
_RESIDENCIES: tuple[Residency, ...] = ("save", "recompute", "offload")
_MIB = 2**20
_NAME_WIDTH = 30
_NUM_SHOWN_OPERATORS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResidency:
    """What becomes of the tensors that one layer makes and the backward needs."""

    layer: str
    """Name of the layer's module; empty for all that is outside of layers."""

    num_bytes: dict[Residency, int] = field(default_factory=dict)
    """Bytes saved, recomputed and offloaded; views of one memory count once."""

    num_tensors: dict[Residency, int] = field(default_factory=dict)

    bytes_by_operator: dict[str, int] = field(default_factory=dict)
    """Bytes saved and offloaded by the operator that made them, most first."""


def residency_by_layer(
    graph_module: GraphModule, *, layers: str | Callable[[Node], str | None] = "layers.*"
) -> tuple[LayerResidency, ...]:
    """What is kept of the forward, by layer in the order of the forward.

    Inputs and gathered parameters do not count. Before a memory policy ran, all that the backward
    reads is saved; after it, what its tags say, which the passes that act on them keep true.

    Args:
        graph_module: a captured step.
        layers: pattern of the names of the modules that are layers, or what says of a node which.
    """
    storages = Storages(graph_module)
    recomputability = Recomputability(storages)
    layer_of = LayerNames(layers).layer_of if isinstance(layers, str) else layers
    num_bytes: dict[str, Counter[Residency]] = {}
    num_tensors: dict[str, Counter[Residency]] = {}
    operators: dict[str, Counter[str]] = {}
    for storage, maker in enumerate(storages.maker):
        residency = _residency(storage, maker, recomputability)
        if residency is None:
            continue
        layer = layer_of(maker) or ""
        size = storages.num_bytes[storage]
        num_bytes.setdefault(layer, Counter())[residency] += size
        num_tensors.setdefault(layer, Counter())[residency] += 1
        by_operator = operators.setdefault(layer, Counter())
        if residency != "recompute":
            by_operator[operator_name(maker)] += size
    return tuple(
        LayerResidency(
            layer=layer,
            num_bytes=dict(num_bytes[layer]),
            num_tensors=dict(num_tensors[layer]),
            bytes_by_operator=dict(operators[layer].most_common()),
        )
        for layer in num_bytes
    )


def residency_table(graph_module: GraphModule, *, layers: str = "layers.*") -> str:
    """``residency_by_layer`` as a table; neighbouring layers that are alike share a line."""
    rows = residency_by_layer(graph_module, layers=layers)
    heads = "".join(f"{head:>20}" for head in ("saved MiB", "recomputed MiB", "offloaded MiB"))
    lines = [f"{'layer':<{_NAME_WIDTH}}{heads}  most kept by"]
    lines += [_line(name, [row]) for name, row in _alike_together(rows)]
    lines.append(_line("total", rows))
    return "\n".join(lines)


def _residency(storage: int, maker: Node, recomputability: Recomputability) -> Residency | None:
    """What becomes of a storage; None if the backward does not need it of the forward."""
    backward = recomputability.is_backward
    if maker.op != "call_function" or maker in backward or is_gathered(maker):
        return None
    if phase_of(maker) == "optimizer" or is_host_copy(maker):
        return None
    holders = recomputability.holders(storage)
    if _OFFLOAD in (read_annotation(holder, ResidencyAnnotation) for holder in holders):
        return "offload"
    tag = read_annotation(maker, ResidencyAnnotation)
    if tag is not None:
        return tag.residency
    is_read = any(not backward.isdisjoint(holder.users) for holder in holders)
    return "save" if is_read else None


def _alike_together(rows: Iterable[LayerResidency]) -> Iterator[tuple[str, LayerResidency]]:
    """Each row with its name; runs of equal layers as one, under the names of first and last."""
    for _, run in itertools.groupby(rows, key=_content):
        first, *others = run
        name = first.layer or "(outside)"
        yield (f"{name} to {others[-1].layer}, each" if others else name), first


def _content(row: LayerResidency) -> tuple[object, ...]:
    """Equal for rows that can share a line."""
    numbers = (row.num_bytes, row.num_tensors, row.bytes_by_operator)
    return (bool(row.layer), *(tuple(sorted(each.items())) for each in numbers))


def _line(name: str, rows: Sequence[LayerResidency]) -> str:
    cells = []
    for residency in _RESIDENCIES:
        num_bytes = sum(row.num_bytes.get(residency, 0) for row in rows)
        num_tensors = sum(row.num_tensors.get(residency, 0) for row in rows)
        cells.append(f"{num_bytes / _MIB:>12,.2f} ({num_tensors})".rjust(20))
    operators: Counter[str] = Counter()
    for row in rows:
        operators.update(row.bytes_by_operator)
    most = ", ".join(name for name, _ in operators.most_common(_NUM_SHOWN_OPERATORS))
    return f"{name:<{_NAME_WIDTH}}{''.join(cells)}  {most}".rstrip()
