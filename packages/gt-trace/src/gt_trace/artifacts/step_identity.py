"""What a stored step was captured from, as far as a step itself can tell: its identity.

Names, shapes, dtypes and placements of the state, versions of torch, Python and this package, and
whatever the caller adds, since two models of equal parameters may compute otherwise.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from gt_config import Fingerprint
from gt_trace.artifacts.encoder import Encoder
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.capture.module_state import StateEntry, collect_state
from gt_trace.capture.subclass_layout import TensorLayout, flatten_tensor
from gt_trace.capture.traced_step import TracedStep

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
