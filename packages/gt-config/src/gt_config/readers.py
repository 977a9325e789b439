"""The mark by which a configuration field says when something reads the option.

An option that nothing in a run reads is refused. The text of the refusal follows from the mark: it
names what the option lacks. A field without a mark is read by nothing. The marks are tested where
the passes are known (gt-trainer's ``tests/preflight/test_idle_options.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from gt_config.topology import MeshAxis

READERS_KEY = "gt_config.readers"


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededValue:
    """Values of another option, or of a degree, without which nothing reads an option."""

    path: str
    """The other option, as ``config.mode`` or ``topology.pp``."""
    values: tuple[object, ...] = ()
    """The values that it needs. Empty: any but None for an option, 2 or more for a degree."""

    def holds_for(self, value: object) -> bool:
        """Return whether the other option may have this value."""
        return value in self.values if self.values else value not in (None, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """The conditions under which something in a run reads an option."""

    needs: tuple[NeededValue, ...] = ()
    """All of them must hold."""
    axes: tuple[MeshAxis, ...] = ()
    """One of these must have several ranks, unless a solver places the model."""
    is_pass: bool = False
    """Whether passes alone read it, so that the recipe shows what it does."""


def read(*needs: NeededValue, axes: tuple[MeshAxis, ...] = ()) -> MappingProxyType[str, Readers]:
    """Return metadata for a field whose option is read by something else than passes.

    Args:
        needs: What must hold.
        axes: Axes of the mesh; one of them must have several ranks.
    """
    return MappingProxyType({READERS_KEY: Readers(needs=needs, axes=axes)})


def read_by_passes(
    *needs: NeededValue, axes: tuple[MeshAxis, ...] = ()
) -> MappingProxyType[str, Readers]:
    """Return metadata for a field whose option is read by passes alone.

    Args:
        needs: What must hold.
        axes: Axes of the mesh whose ranks exchange what the passes work on.
    """
    return MappingProxyType({READERS_KEY: Readers(needs=needs, axes=axes, is_pass=True)})
