"""A captured step in a file of its own: ``gt_trace.save`` and ``gt_trace.load``."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from gt_config import Fingerprint
from gt_trace._torch_internals import FakeTensorMode
from gt_trace.artifacts.container import open_container, write_container
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.artifacts.operators import NAMESPACES
from gt_trace.artifacts.step_document import decode_step, encode_step
from gt_trace.capture.traced_step import TracedStep

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

STEP_KIND = "traced step"
_DOCUMENT = "step"


def save(
    step: TracedStep,
    path: str | os.PathLike[str],
    *,
    fingerprint: Fingerprint,
    meshes: Iterable[DeviceMesh] = (),
    groups: Mapping[str, str] | None = None,
    namespaces: Collection[str] = (),
) -> None:
    """Write a captured step to a file, all of it or nothing.

    Args:
        step: as captured, or after passes; not after code was generated for it.
        path: of the file, which is replaced.
        fingerprint: of what the step was captured from; who loads it gives an equal one.
        meshes: on which the step computes, if any; the same, in one order, for ``load``.
        groups: names of process groups that are no axes of them, by labels of the caller's.
        namespaces: of operators of other libraries that the graph calls.

    Raises:
        ArtifactError: the step holds something that no file can hold, which is named, or the
            file cannot be written.
    """
    axes = MeshAxes.of(meshes, groups=groups)
    encoded = encode_step(step, axes, namespaces=NAMESPACES | set(namespaces))
    write_container(
        path,
        kind=STEP_KIND,
        fingerprint=fingerprint,
        documents={_DOCUMENT: encoded.document},
        blobs=encoded.blobs,
    )


def load(
    path: str | os.PathLike[str],
    *,
    fingerprint: Fingerprint,
    meshes: Iterable[DeviceMesh] = (),
    groups: Mapping[str, str] | None = None,
    namespaces: Collection[str] = (),
    fake_mode: FakeTensorMode | None = None,
) -> TracedStep:
    """Read a captured step that ``save`` wrote, in this process or another.

    Nothing of the file runs. ``TracedStep.bind`` compares the module with the captured one, and
    ``gt_passes.Verifier`` the shapes that the file claims with those that its operators give.

    Args:
        path: of the file.
        fingerprint: of what would be captured here. It is compared first.
        meshes: as for ``save``, of this rank.
        groups: as for ``save``, of this rank.
        namespaces: as for ``save``.
        fake_mode: as for ``trace_step``.

    Raises:
        StaleFingerprintError: (gt-config's) the file was made of something else; names every field
            that differs.
        ArtifactDamagedError: the file is not the one that was written.
        ArtifactVersionError: it was written in another format.
        ArtifactError: it cannot be read, or names an operator or axis that there is not here.
    """
    with open_container(path, kind=STEP_KIND, fingerprint=fingerprint) as container:
        return decode_step(
            container.document(_DOCUMENT),
            MeshAxes.of(meshes, groups=groups),
            blob=container.blob,
            fake_mode=fake_mode,
            namespaces=NAMESPACES | set(namespaces),
        )
