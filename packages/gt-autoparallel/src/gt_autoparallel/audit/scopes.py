"""Where nodes run: the layers of a model, and modules at its top, by names alone."""

from __future__ import annotations

from functools import cache

from gt_autoparallel.graph.placement_graph import PlacementNode


def scope(node: PlacementNode) -> str:
    """The layer, or the module at the top, in which a node runs."""
    return _scope(node.module)[0]


def is_in_layer(node: PlacementNode) -> bool:
    """Whether a node runs in a layer."""
    return _scope(node.module)[1]


@cache
def _scope(module: str) -> tuple[str, bool]:
    parts = module.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    name = ".".join(parts[: numbers[0] + 1]) if numbers else parts[0]
    return name or "model", bool(numbers)
