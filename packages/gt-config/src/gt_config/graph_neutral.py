"""The mark by which a configuration field opts out of the fingerprint.

A field is in the fingerprint unless its own declaration says that it cannot matter, with a reason,
so that forgetting costs a needless recapture and never a stale graph. The mark is a mapping for
``dataclasses.field(metadata=...)`` rather than a wrapper of ``field``, because type checkers only
understand ``field`` itself.
"""

from __future__ import annotations

from dataclasses import Field
from types import MappingProxyType
from typing import Any

_METADATA_KEY = "gt_config.graph_neutral"


def graph_neutral(reason: str) -> MappingProxyType[str, str]:
    """Metadata for a field whose value cannot change the captured graph or what is known of it.

    Args:
        reason: why no value of the field can matter to a stored graph.

    Raises:
        ValueError: the reason is empty.

    Example::

        debug_graph_passes: bool = field(
            default=False, metadata=graph_neutral("writes text files; edits no graph")
        )
    """
    if not reason.strip():
        raise ValueError("graph_neutral needs the reason why the field cannot affect the graph")
    return MappingProxyType({_METADATA_KEY: reason})


def is_graph_neutral(field: Field[Any]) -> bool:
    """Whether the field's declaration takes it out of the fingerprint."""
    return _METADATA_KEY in field.metadata
