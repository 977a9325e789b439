"""The ranks that share a sequence, as collectives name them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceAxis:
    """The mesh axis whose ranks share a sequence, as its collectives need it.

    Axes are equal on all ranks of a mesh. Modules hold an axis, and must have equal fingerprints on
    ranks that may share a captured graph.
    """

    name: str
    group_name: str = field(compare=False)
    num_ranks: int
    rank: int = field(compare=False)
    """Coordinate of this process on the axis."""

    @classmethod
    def of(cls, mesh: DeviceMesh) -> SequenceAxis:
        """The axis of a mesh that has one.

        Raises:
            ValueError: the mesh has another number of axes, or none has a name.
        """
        names = mesh.mesh_dim_names
        if mesh.ndim != 1 or not names:
            raise ValueError(
                f"{mesh} has the axes {names}; allowed: one named axis, whose ranks share a "
                "sequence"
            )
        return cls(
            name=names[0],
            group_name=mesh.get_group().group_name,
            num_ranks=mesh.size(),
            rank=mesh.get_local_rank(),
        )
