"""A check on real values: is what chunks were joined to the value of the unchunked graph?

For whoever writes a rule, or an operator for an expert-parallel region. A wrong join runs without
an error and trains a wrong model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from gt_passes.ep_overlap.graph_chunks import Join


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongJoin:
    """A joined value that is not the unchunked one."""

    join: Join
    relative_error: float
    """Norm of the difference over that of the unchunked value; infinite for other shapes."""

    def __str__(self) -> str:
        return (
            f"{self.join.joined} ({self.join.kind}) differs from {self.join.unchunked} "
            f"by {self.relative_error:.1e} of its norm"
        )


def check_joins(
    unchunked: GraphModule,
    chunked: GraphModule,
    joins: Sequence[Join],
    inputs: Sequence[Any],
    *,
    relative_tolerance: float = 1e-5,
) -> tuple[WrongJoin, ...]:
    """Run both graphs and compare every join.

    With collectives inside, every rank must call it.

    Args:
        unchunked: a deep copy made before ``chunk_graph``.
        chunked: the graph after it.
        joins: that ``chunk_graph`` reported.
        inputs: real values of the placeholders; each graph runs on clones.
        relative_tolerance: of the norm of a value; right for float32.

    Returns:
        The joins that are wrong, in the order of ``joins``.
    """
    expected = _values(unchunked, {join.unchunked for join in joins}, inputs)
    found = _values(chunked, {join.joined for join in joins}, inputs)
    wrong = []
    for join in joins:
        error = _relative_error(expected[join.unchunked], found[join.joined])
        if not error <= relative_tolerance:
            wrong.append(WrongJoin(join=join, relative_error=error))
    return tuple(wrong)


class _Recorder(Interpreter):
    def __init__(self, graph_module: GraphModule, names: Collection[str]) -> None:
        super().__init__(graph_module)
        self._names = names
        self.values: dict[str, torch.Tensor] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.name in self._names:
            self.values[n.name] = result.clone()
        return result


def _values(
    graph_module: GraphModule, names: Collection[str], inputs: Sequence[Any]
) -> dict[str, torch.Tensor]:
    recorder = _Recorder(graph_module, names)
    clones = [each.clone() if isinstance(each, torch.Tensor) else each for each in inputs]
    with torch.no_grad():
        recorder.run(*clones)
    return recorder.values


def _relative_error(expected: torch.Tensor, found: torch.Tensor) -> float:
    if expected.shape != found.shape:
        return float("inf")
    wide = torch.complex128 if expected.is_complex() else torch.float64
    difference = (expected.to(wide) - found.to(wide)).norm()
    return float(difference / expected.to(wide).norm().clamp_min(1e-30)) if difference else 0.0
