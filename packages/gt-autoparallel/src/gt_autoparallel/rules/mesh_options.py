"""From what a node may do along one mesh axis to what it may do on the whole mesh."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch.distributed.tensor import Placement, Shard

from gt_autoparallel.graph.layouts import Layout, MeshShape
from gt_autoparallel.graph.options import AxisOption, NodeOption
from gt_autoparallel.graph.placement_graph import TensorSpec
from gt_autoparallel.rules.dim_labels import PARTIAL, REPLICATE, shard
from gt_autoparallel.rules.pointwise import can_be_partial


def combine(
    options: Iterable[AxisOption],
    operands: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec | None],
    mesh: MeshShape,
) -> tuple[NodeOption, ...]:
    """Every choice of one option for each axis that cuts every tensor evenly.

    Two choices that agree in all layouts are one option: the first.
    """
    sizes, offsets = _sizes_and_offsets((*operands, *outputs))
    cuts = [(option, _cut_places(option, offsets)) for option in dict.fromkeys(options)]
    found: dict[tuple[object, ...], NodeOption] = {}
    for chosen in _choices(cuts, sizes, mesh.sizes):
        layouts = tuple(zip(*(option.operands for option in chosen), strict=True))
        out = tuple(
            None if placements[0] is None else placements
            for placements in zip(*(option.outputs for option in chosen), strict=True)
        )
        key = (layouts, out)
        if key not in found:
            found[key] = NodeOption(operands=layouts, outputs=out, axis_options=chosen)
    return tuple(found.values())


def layouts_of(
    spec: TensorSpec, mesh: MeshShape, *, allow_partial: bool = False
) -> tuple[Layout, ...]:
    """Every layout that cuts a tensor evenly, in a fixed order.

    ``allow_partial``: whether the tensor may be a sum over ranks; truth values never are.
    """
    placements: list[Placement] = [REPLICATE, *(shard(dim) for dim in range(len(spec.shape)))]
    if allow_partial and can_be_partial(spec):
        placements.append(PARTIAL)
    options = [AxisOption(operands=(), outputs=(placement,)) for placement in placements]
    combined = combine(options, (), (spec,), mesh)
    return tuple(layout for option in combined for layout in option.outputs if layout is not None)


def _sizes_and_offsets(
    specs: Sequence[TensorSpec | None],
) -> tuple[list[int], list[tuple[int, int]]]:
    """Sizes of all dims of all tensors in one list; where each tensor starts, and its dims."""
    sizes: list[int] = []
    offsets = []
    for spec in specs:
        shape = () if spec is None else spec.shape
        offsets.append((len(sizes), len(shape)))
        sizes.extend(shape)
    return sizes, offsets


def _cut_places(option: AxisOption, offsets: Sequence[tuple[int, int]]) -> tuple[int, ...] | None:
    """Which sizes an option divides; None if it names a dim that is not there."""
    places = []
    for placement, (offset, num_dims) in zip(
        (*option.operands, *option.outputs), offsets, strict=True
    ):
        if not isinstance(placement, Shard):
            continue
        if placement.dim >= num_dims:
            return None
        places.append(offset + placement.dim)
    return tuple(places)


def _choices(
    cuts: Sequence[tuple[AxisOption, tuple[int, ...] | None]],
    sizes: Sequence[int],
    axes: Sequence[int],
) -> Iterator[tuple[AxisOption, ...]]:
    if not axes:
        yield ()
        return
    count = axes[0]
    for option, places in cuts:
        if places is None or any(sizes[place] % count for place in places):
            continue
        left = list(sizes)
        for place in places:
            left[place] //= count
        if any(left[place] == 0 for place in places):
            continue
        for rest in _choices(cuts, left, axes[1:]):
            yield (option, *rest)
