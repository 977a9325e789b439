"""Process groups, meshes and devices under names that mean the same on every rank.

A graph names its process groups by what this process happens to call them. In an artifact a group
is an axis of a mesh, a mesh is the names of its axes, and the device of this rank is its own: what
each of them is on another rank follows from where that rank stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from gt_trace.capture.module_state import StateSlot, collect_state
from gt_trace.capture.subclass_layout import TensorLayout, flatten_tensor
from gt_trace.errors import ArtifactError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxes:
    """What this rank calls the axes of its meshes, and where it stands on them."""

    groups: Mapping[str, str] = field(default_factory=dict)
    """Name of this rank's process group by label: the name of an axis, or of a group that is none.
    """

    coordinates: Mapping[str, int] = field(default_factory=dict)
    """Position of this rank by label of the axis, from 0."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    """Number of ranks along each axis, by its label."""

    meshes: Mapping[str, DeviceMesh] = field(default_factory=dict)
    """By label: the names of the axes, with commas between."""

    device_index: int = 0
    """Of this rank's accelerator among those of its host."""

    @classmethod
    def of(
        cls, meshes: Iterable[DeviceMesh] = (), *, groups: Mapping[str, str] | None = None
    ) -> MeshAxes:
        """The axes of meshes, in the order given, which must be the same on every rank.

        Two axes of one name that are different groups get labels of their own, by their mesh.

        Args:
            meshes: those that this rank belongs to; others are passed over.
            groups: names of process groups that are no axes, by a label that is the same on every
                rank: second groups of an axis, say.

        Raises:
            ArtifactError: an axis has no name, or a label of ``groups`` is that of an axis.
        """
        made = cls(groups={}, coordinates={}, sizes={}, meshes={}, device_index=_device_index())
        for mesh in meshes:
            made._add(mesh)
        for label, name in (groups or {}).items():
            if label in made.groups:
                raise ArtifactError(f"two process groups have the label {label!r}")
            made._put("groups", label, name)
        return made

    @classmethod
    def of_module(
        cls, module: nn.Module | None, *, groups: Mapping[str, str] | None = None
    ) -> MeshAxes:
        """The axes of the meshes on which the parameters and buffers of ``module`` lie."""
        slots: Sequence[StateSlot] = [] if module is None else collect_state(module)
        found: list[DeviceMesh] = []
        for slot in slots:
            found += meshes_of(flatten_tensor(slot.tensor)[1])
        return cls.of(found, groups=groups)

    def label_of_group(self, name: str) -> str:
        """The label of a process group.

        Raises:
            ArtifactError: no mesh or labelled group that was given is that one.
        """
        for label, known in self.groups.items():
            if known == name:
                return label
        raise ArtifactError(
            f"the process group {name!r} is no axis of a mesh that is known here; known are "
            f"{', '.join(self.groups) or 'none'}. Give its mesh (meshes=), or a label for it "
            "(groups=)"
        )

    def group(self, label: str) -> str:
        """The name of this rank's process group of that label.

        Raises:
            ArtifactError: there is none here.
        """
        if label not in self.groups:
            raise ArtifactError(
                f"a graph communicates over {label!r}; known here are "
                f"{', '.join(self.groups) or 'no axes'}"
            )
        return self.groups[label]

    def label_of_mesh(self, mesh: DeviceMesh) -> str:
        """The label of a mesh.

        Raises:
            ArtifactError: it was not given.
        """
        for label, known in self.meshes.items():
            if known == mesh:
                return label
        raise ArtifactError(f"the mesh {mesh} is not known here: give it (meshes=)")

    def mesh(self, label: str) -> DeviceMesh:
        """The mesh of that label.

        Raises:
            ArtifactError: there is none here.
        """
        if label not in self.meshes:
            raise ArtifactError(
                f"a tensor lies on the mesh {label!r}; known here are "
                f"{', '.join(self.meshes) or 'no meshes'}"
            )
        return self.meshes[label]

    def coordinate(self, label: str) -> int:
        """Where this rank stands on an axis, from 0.

        Raises:
            ArtifactError: there is no such axis here.
        """
        if label not in self.coordinates:
            raise ArtifactError(f"a graph depends on the place along {label!r}, no axis here")
        return self.coordinates[label]

    def _add(self, mesh: DeviceMesh) -> None:
        names = mesh.mesh_dim_names
        if names is None:
            raise ArtifactError(f"the axes of {mesh} have no names (mesh_dim_names)")
        if mesh.get_coordinate() is None or any(mesh == known for known in self.meshes.values()):
            return
        label = ",".join(names)
        self._put("meshes", _free(label, self.meshes), mesh)
        for dim, name in enumerate(names):
            group = mesh.get_group(dim).group_name
            if group in self.groups.values():
                continue
            own = name if name not in self.groups else _free(f"{name} of {label}", self.groups)
            self._put("groups", own, group)
            self._put("coordinates", own, mesh.get_local_rank(dim))
            self._put("sizes", own, mesh.size(dim))

    def _put(self, table: str, key: str, value: object) -> None:
        getattr(self, table)[key] = value  # while it is made; frozen for others


def meshes_of(layout: TensorLayout | None) -> list[DeviceMesh]:
    """The meshes that a tensor of that layout lies on, the outer first."""
    if layout is None or layout.subclass is None:
        return []
    from torch.distributed.device_mesh import DeviceMesh

    held = (*(value for _, value in layout.constants), *_items(layout.context))
    own = [each for each in held if isinstance(each, DeviceMesh)]
    return own + [each for _, inner in layout.attributes for each in meshes_of(inner)]


def _items(context: object) -> tuple[object, ...]:
    """What stands in the context of a layout, one level deep."""
    if not isinstance(context, tuple):
        return ()
    return (*context, *(getattr(each, "mesh", None) for each in context))


def _free(label: str, taken: Mapping[str, object]) -> str:
    free, number = label, 1
    while free in taken:
        number += 1
        free = f"{label} #{number}"
    return free


def _device_index() -> int:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return 0 if accelerator is None else torch.accelerator.current_device_index()
