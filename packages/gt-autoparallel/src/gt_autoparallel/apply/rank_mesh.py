"""A planned mesh as one rank runs on it: process groups and the rank's place."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from gt_autoparallel.errors import PlanMismatchError
from gt_autoparallel.graph.layouts import MeshShape


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMesh:
    """What a local program needs to know of a device mesh."""

    shape: MeshShape
    group_names: tuple[str, ...]
    """Names of the process group of each axis, as functional collectives take them."""

    coordinate: tuple[int, ...]
    """Position of this rank on each axis."""

    device_type: str

    @classmethod
    def of(cls, mesh: DeviceMesh, planned: MeshShape) -> RankMesh:
        """This rank's view of ``mesh``.

        Raises:
            PlanMismatchError: the mesh is not the planned one, or lacks this rank.
        """
        names = mesh.mesh_dim_names
        found = None if names is None else MeshShape.of(mesh)
        if found != planned:
            raise PlanMismatchError(
                f"the plan is for a mesh {_text(planned)}, and this one is "
                f"{'without axis names' if found is None else _text(found)}; plan again for it"
            )
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise PlanMismatchError("this rank is not part of the mesh")
        groups = (mesh.get_group(axis) for axis in range(mesh.ndim))
        return cls(
            shape=planned,
            group_names=tuple(group.group_name for group in groups),
            coordinate=tuple(coordinate),
            device_type=mesh.device_type,
        )


def _text(mesh: MeshShape) -> str:
    return repr(dict(zip(mesh.names, mesh.sizes, strict=True)))
