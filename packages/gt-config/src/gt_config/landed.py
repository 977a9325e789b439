"""Options that this version knows and refuses, because what they ask for has not been built yet.

Graph Trainer lands in parts, and the configuration's shape was fixed first. An option whose part
is missing must be refused by name, and never accepted and ignored. The list is data: landing a part
means deleting its entries here, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gt_config._subject import leaf_paths
from gt_config.compile_config import CompileConfig
from gt_config.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class UnlandedOption:
    """A field, and those of its values that are refused for now."""

    path: str
    """``config.`` or ``topology.``, then the field's dotted path."""

    refused: Callable[[object], bool]
    """Whether a value of the right type is refused."""

    landed: str
    """What is accepted today, in words."""

    reason: str
    """Why the rest is refused, and when it comes."""

    def __post_init__(self) -> None:
        known = {*leaf_paths(CompileConfig, "config"), *leaf_paths(Topology, "topology")}
        if self.path not in known:
            raise ValueError(f"{self.path!r} is no field of the configuration or the topology")


def _above(limit: int) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int) and value > limit


UNLANDED: tuple[UnlandedOption, ...] = (
    UnlandedOption(
        path="topology.cp",
        refused=_above(1),
        landed="1",
        reason="context parallelism is not supported yet",
    ),
)
"""Everything that is refused today."""
