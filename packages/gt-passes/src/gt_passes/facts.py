"""Facts about a graph: what one pass establishes and another relies on.

Passes name facts, never each other, so that a pass can be replaced by another that establishes the
same, and so that a fact may also hold from the start (``PassManager(given_facts=...)``): chunks
made eagerly before tracing and chunks made by a pass are one fact.

A fact that holds stays true: every later pass keeps what was established before it, and cleans up
behind itself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that holds of a graph. Two facts are the same when their names are."""

    name: str
    """Kebab-case, a statement about the graph; shown in errors."""

    def __str__(self) -> str:
        return self.name


NO_DEAD_CODE = Fact("no-dead-code")
"""Every node has a user or an effect."""

CANONICAL_VIEWS = Fact("canonical-views")
"""No view that changes nothing, no chain of reshapes where one does, one spelling for each."""

ONE_ALL_GATHER_PER_PARAMETER = Fact("one-all-gather-per-parameter")
"""Equal FSDP unshard chains of one parameter have been merged."""
