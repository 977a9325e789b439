"""Which layer a module belongs to, and which window a node: by the names of modules.

A layer is the outermost module whose name in its parent is a number: ``layers.3`` of
``layers.3.attention.wq``. A window is a layer, or a top-level module outside of layers, in one
phase; a third one is the optimizer's, whose work stands at the parameters.
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
    """The window in which a node computes: ``"layers.3 forward"``, ``"output backward"``."""
    phase = "optimizer" if node.kind == "parameter" else node.phase
    return f"{window_scope(node)} {phase}"


def backward_window(node: PlacementNode) -> str:
    """The window in which a node of the forward computes if it runs again."""
    return f"{window_scope(node)} backward"


def window_scope(node: PlacementNode) -> str:
    """A node's layer, or its top-level module outside of layers.

    What belongs to no submodule is in the scope of the model itself.
    """
    return layer_of_module(node.module) or node.module.partition(".")[0] or _WHOLE_MODEL
