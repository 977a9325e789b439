"""A captured step in a file of its own: ``gt_trace.save`` and ``gt_trace.load``."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import version
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gt_config import Fingerprint
from gt_trace._torch_internals import FakeTensorMode
from gt_trace.artifacts.container import open_container, write_container
from gt_trace.artifacts.encoder import Encoder
from gt_trace.artifacts.mesh_axes import MeshAxes, meshes_of
from gt_trace.artifacts.operators import NAMESPACES
from gt_trace.artifacts.step_document import STEP_FORM
from gt_trace.capture.module_state import StateEntry, collect_state
from gt_trace.capture.subclass_layout import TensorLayout, flatten_tensor
from gt_trace.capture.traced_step import TracedStep

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_KIND = "traced step"
_DOCUMENT = "step"
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def save(
    step: TracedStep,
    path: str | os.PathLike[str],
    *,
    identity: Mapping[str, Any] = _NOTHING,
    meshes: Iterable[DeviceMesh] = (),
    groups: Mapping[str, str] = _NOTHING,
    namespaces: Collection[str] = (),
) -> None:
    """Write a captured step to a file, all of it or nothing.

    Args:
        step: as captured, or after passes; not after code was generated for it.
        path: of the file, which is replaced.
        identity: plain data that tells what the step was captured from, beside what it tells
            itself (names, shapes and placements of the state, versions): the model's configuration,
            say. Who loads it must give the same.
        meshes: on which the step computes, beside those of its parameters.
        groups: names of process groups that are no axes of meshes, by labels of the caller's.
        namespaces: of operators of other libraries that the graph calls.

    Raises:
        ArtifactError: the step holds something that no file can hold, which is named, or the
            file cannot be written.
        gt_config.FingerprintTypeError: ``identity`` is no plain data.
    """
    own = [mesh for layout in step.state_layouts for mesh in meshes_of(layout)]
    axes = MeshAxes.of([*own, *meshes], groups=groups)
    encoded = STEP_FORM.encode(step, axes, namespaces=NAMESPACES | set(namespaces))
    write_container(
        path,
        kind=_KIND,
        fingerprint=identity_of_step(step, axes, identity),
        documents={_DOCUMENT: encoded.document},
        blobs=encoded.blobs,
    )


def load(
    path: str | os.PathLike[str],
    module: nn.Module | None = None,
    *,
    identity: Mapping[str, Any] = _NOTHING,
    meshes: Iterable[DeviceMesh] = (),
    groups: Mapping[str, str] = _NOTHING,
    namespaces: Collection[str] = (),
    fake_mode: FakeTensorMode | None = None,
) -> TracedStep:
    """Read a captured step that ``save`` wrote, in this process or another.

    Nothing of the file runs. ``TracedStep.bind`` compares modes and hooks of the module with the
    captured ones; ``gt_passes.Verifier`` compares the shapes that the file claims with those that
    its operators give.

    Args:
        path: of the file.
        module: that which the step is to be bound to; None for a step without one.
        identity: as for ``save``.
        meshes: as for ``save``, of this rank.
        groups: as for ``save``, of this rank.
        namespaces: as for ``save``.
        fake_mode: as for ``trace_step``.

    Raises:
        StaleFingerprintError: (gt-config's) the file is of something else: names every field that
            differs, before anything else of the file is read.
        ArtifactDamagedError: the file is not the one that was written.
        ArtifactVersionError: it was written in another format.
        ArtifactError: it cannot be read, or names an operator or axis that there is not here.
    """
    slots = collect_state(module)
    own = [mesh for slot in slots for mesh in meshes_of(flatten_tensor(slot.tensor)[1])]
    axes = MeshAxes.of([*own, *meshes], groups=groups)
    fingerprint = identity_of_module(module, axes, identity)
    with open_container(path, kind=_KIND, fingerprint=fingerprint) as container:
        return STEP_FORM.decode(
            container.document(_DOCUMENT),
            axes,
            blob=container.blob,
            fake_mode=fake_mode,
            namespaces=NAMESPACES | set(namespaces),
        )


# What a stored step was captured from, as far as a step itself can tell: its identity.
#
# Names, shapes, dtypes and placements of the state, versions of torch, Python and this package,
# and whatever the caller adds, since two models of equal parameters may compute otherwise.
StatePart = tuple[StateEntry, TensorLayout, Sequence[torch.Tensor]]
"""A tensor of the state: its names, how it is made of plain tensors, and those."""


def identity_of_step(step: TracedStep, axes: MeshAxes, further: Mapping[str, Any]) -> Fingerprint:
    """The identity under which a step is stored.

    Args:
        step: as captured.
        axes: names of this rank's meshes.
        further: plain data of the caller's that tells what the step was captured from.

    Raises:
        gt_config.FingerprintTypeError: ``further`` is no plain data.
    """
    parts: list[StatePart] = []
    start = 0
    for entry, layout in zip(step.state, step.state_layouts, strict=True):
        leaves = step.example_inputs[start : start + layout.num_leaves]
        parts.append((entry, layout, leaves))
        start += layout.num_leaves
    return _identity(parts, axes, further)


def identity_of_module(
    module: nn.Module | None, axes: MeshAxes, further: Mapping[str, Any]
) -> Fingerprint:
    """The identity of a step of ``module`` that would be captured now: see ``identity_of_step``."""
    parts: list[StatePart] = []
    for slot in collect_state(module):
        leaves, layout = flatten_tensor(slot.tensor)
        parts.append((slot.entry, layout, leaves))
    return _identity(parts, axes, further)


def _identity(
    parts: Sequence[StatePart], axes: MeshAxes, further: Mapping[str, Any]
) -> Fingerprint:
    encoder = Encoder(axes)
    state = {
        entry.name: {
            "kind": entry.kind,
            "aliases": list(entry.names[1:]),
            "plain tensors": [f"{leaf.dtype} {list(leaf.shape)}" for leaf in leaves],
            "layout": json.dumps(encoder.layout(layout)),
        }
        for entry, layout, leaves in parts
    }
    environment = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "gt-trace": version("gt-trace"),
    }
    return Fingerprint.of({"state": state, "environment": environment, "identity": dict(further)})
