"""Which layer a module belongs to, and which window a node: by the names of modules.

A layer is the outermost module whose name in its parent is a number: ``layers.3`` of
``layers.3.attention.wq``. A window is a layer, or a top-level module outside of layers, in one
phase.
"""

from __future__ import annotations

from functools import cache

from gt_autoparallel.graph.placement_graph import PlacementNode

_WHOLE_MODEL = "model"


@cache
def layer_of_module(fqn: str) -> str | None:
    """The layer in which a module, parameter or buffer of this name lies; None outside layers."""
    components = fqn.split(".")
    for position, component in enumerate(components):
        if component.isdigit():
            return ".".join(components[: position + 1])
    return None


def window_name(node: PlacementNode) -> str:
    """The window in which a node computes: ``"layers.3 forward"``, ``"output backward"``.

    What belongs to no submodule is in the window of the model itself.
    """
    layer = layer_of_module(node.module)
    return f"{layer or node.module.partition('.')[0] or _WHOLE_MODEL} {node.phase}"
