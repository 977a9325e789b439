"""One thing that the verifier found wrong with a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Check = Literal[
    "well-formed",
    "inputs and outputs",
    "fake re-propagation",
    "memory order",
    "refused writes",
    "barriers",
    "random numbers",
    "collective waits",
    "copy waits",
    "collective arguments",
    "dataflow",
    "declared bounds",
]
"""The verifier's checks, by the names that errors show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphProblem:
    """What is wrong, where, and how it differs from what was expected."""

    check: Check

    node_name: str | None = None
    """None when the graph as a whole is meant."""

    target: str | None = None
    """What the node calls, as text."""

    message: str
    expected: str | None = None
    got: str | None = None

    def __str__(self) -> str:
        where = "the graph" if self.node_name is None else f"node {self.node_name}"
        what = "" if self.target is None else f" ({self.target})"
        lines = [f"[{self.check}] {where}{what}", self.message]
        if self.expected is not None:
            lines.append(f"expected {self.expected}")
        if self.got is not None:
            lines.append(f"got      {self.got}")
        return "\n".join(lines)
