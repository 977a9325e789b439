"""What the rules look at: a configuration and a topology, addressed by dotted paths.

``config.ep_overlap.num_chunks`` and ``topology.tp`` name values in rules and in the record of what
is already known to be wrong, and map to the user's flags.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

from gt_config._field_types import field_hints
from gt_config.compile_config import CompileConfig
from gt_config.topology import TOPOLOGY_FLAGS, Topology

FLAG_PREFIX = "--compile."


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The data under validation."""

    config: CompileConfig
    topology: Topology
    known_passes: tuple[str, ...]


def flag_of(path: str) -> str:
    """The flag that sets the value at ``path``."""
    root, _, names = path.partition(".")
    return TOPOLOGY_FLAGS[names] if root == "topology" else FLAG_PREFIX + names


def value_at(subject: Subject, path: str) -> Any:
    """The value at ``path``."""
    value: Any = subject
    for name in path.split("."):
        value = getattr(value, name)
    return value


def leaf_paths(cls: type, prefix: str) -> Iterator[str]:
    """The path of every field of the dataclass ``cls``, nested dataclasses opened."""
    for name, hint in field_hints(cls).items():
        if is_dataclass(hint) and isinstance(hint, type):
            yield from leaf_paths(hint, f"{prefix}.{name}")
        else:
            yield f"{prefix}.{name}"
