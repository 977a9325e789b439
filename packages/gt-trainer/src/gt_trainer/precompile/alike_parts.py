"""Which ranks of a run that nobody has started seem alike, each with what it captures.

All are found from the first rank: it places every stage of a pipeline on its own meshes, since
other pipeline ranks hold other stages over meshes of the same shape. Ranks that hold other shapes
are told apart by how tensors are placed, and stages by what would identify their graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trainer._torch_internals import local_shape_at, process_group_named
from gt_trainer.artifacts.alike_ranks import AlikeRanks, Coordinates, spans
from gt_trainer.artifacts.shared_capture import PIPELINE_AXIS
from gt_trainer.precompile.rank_capture import parts_to_capture
from gt_trainer.trainer import GraphTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeParts:
    """Ranks of which nothing is known in which their graphs of some part of the model differ."""

    alike: AlikeRanks
    stages: Mapping[int, int]
    """Which stage of a pipeline each rank would capture; empty without a pipeline."""

    reason: str
    """Why these ranks are apart from the first; "" of those."""

    @property
    def name(self) -> str:
        """What part of the model it is; "" of the whole."""
        found = sorted({*self.stages.values()})
        if not found:
            return ""
        return f"stage{'s' if len(found) > 1 else ''} {', '.join(spans(found))}"


def alike_parts(config: GraphTrainer.Config, world_size: int) -> tuple[AlikeParts, ...]:
    """In a process without a group, which becomes the first rank: what all ranks would capture.

    Args:
        config: a finished configuration that ``preflight`` accepts.
        world_size: number of ranks, none of which is started.
    """
    with parts_to_capture(config, world_size) as to_capture:
        artifacts, schedule = to_capture.artifacts, to_capture.schedule
        found: dict[tuple[str, object], dict[int, Coordinates]] = {}
        stages: dict[tuple[str, object], dict[int, int]] = {}
        for index, program in to_capture.programs.items():
            identity = "" if index is None else artifacts.identity(program).digest
            places = _places(program.axes, world_size)
            for rank, shapes in _shapes(program.asked.model, program.axes, places).items():
                key, at = (identity, shapes), places[rank]
                if index is None or schedule is None:
                    found.setdefault(key, {})[rank] = at
                elif index in schedule.stages_of_rank(at[PIPELINE_AXIS]):
                    found.setdefault(key, {})[rank] = at
                    stages.setdefault(key, {}).setdefault(rank, index)
    parts: list[AlikeParts] = []
    known: set[str] = set()
    for (identity, shapes), ranks in found.items():
        reason = "their tensors have other shapes" if identity in known else ""
        if known and not reason:
            reason = "they hold another stage"
        known.add(identity)
        parts.append(
            AlikeParts(
                alike=AlikeRanks(coordinates=ranks),
                stages=stages.get((identity, shapes), {}),
                reason=reason,
            )
        )
    return tuple(parts)


def _places(axes: MeshAxes, world_size: int) -> dict[int, dict[str, int]]:
    """Where every rank stands, by what the first rank knows of its own meshes."""
    steps = {label: _stride(axes, label) for label in axes.coordinates}
    return {
        rank: {label: rank // steps[label] % axes.sizes[label] for label in steps}
        for rank in range(world_size)
    }


def _stride(axes: MeshAxes, label: str) -> int:
    """How far apart neighbours along an axis are; the first rank stands at the start of each."""
    ranks = dist.get_process_group_ranks(process_group_named(axes.group(label)))
    stride = ranks[1] if len(ranks) > 1 else 1
    assert ranks == [n * stride for n in range(len(ranks))], f"axis {label} is irregular: {ranks}"
    return stride


def _shapes(
    model: torch.nn.Module, axes: MeshAxes, places: Mapping[int, Coordinates]
) -> dict[int, Any]:
    """On each rank, the shapes of what is split unevenly somewhere."""
    uneven = list(_uneven(model, axes))
    return {
        rank: tuple(
            local_shape_at(tensor, [at[label] for label in labels]) for tensor, labels in uneven
        )
        for rank, at in places.items()
    }


def _uneven(model: torch.nn.Module, axes: MeshAxes) -> Iterator[tuple[DTensor, list[str]]]:
    """Parameters and buffers whose parts are of several shapes, one of each kind, and their axes.

    Their first and last parts differ, whatever torch's rule for the remainder.
    """
    seen: set[object] = set()
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, DTensor):
            continue
        mesh = tensor.device_mesh
        kind = (tensor.shape, tensor.placements, mesh)
        ends = ([0] * mesh.ndim, [size - 1 for size in mesh.shape])
        if kind in seen or len({local_shape_at(tensor, end) for end in ends}) == 1:
            continue
        seen.add(kind)
        yield (
            tensor,
            [axes.label_of_group(mesh.get_group(dim).group_name) for dim in range(mesh.ndim)],
        )
