"""Sums of parameter gradients over microbatches, in memory that nothing else has.

The first microbatch's gradients become the sums; later ones are added in place. That is right only
where a gradient is alone in its memory. One of a graph may share it: with another gradient (two
parameters that are only ever added have one), with what leaves the stage, with an input, or with
itself (an expanded scalar). Which do is read off the graph once, and those are copied first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from operator import getitem

import torch
from torch import Tensor
from torch.fx import Node

from gt_passes.analysis.aliasing import shared_nodes
from gt_pipeline.graph._torch_internals import add_in_place, copy_all, fill_with_nothing
from gt_pipeline.graph.action_graph import ActionGraph
from gt_pipeline.graph.slots import SlotKind


class GradientAccumulators:
    """The sums of one step."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._is_empty = True
        self.stands = False
        """Whether the sums lie at addresses that stay, so that nobody may keep them."""

    def add(self, gradients: Sequence[Tensor], owned: Sequence[bool]) -> None:
        """Add one microbatch's gradients, the same parameters' in the same order every time.

        Memory of those that are ``owned`` may be kept and written to; see ``owned_results``.
        """
        if torch.is_grad_enabled():
            # A runner has it off, and doing that again takes as long as many an addition.
            with torch.no_grad():
                self.add(gradients, owned)
        elif self.stands:
            add_in_place(self.standing(list), gradients)
        elif self._is_empty:
            pairs = zip(gradients, owned, strict=True)
            self._sums = [gradient if own else gradient.clone() for gradient, own in pairs]
            self._is_empty = False
        elif self._sums:
            add_in_place(self._sums, gradients)

    def standing(self, new: Callable[[], list[Tensor]]) -> list[Tensor]:
        """The sums, to be added to, at the same addresses in every step.

        Args:
            new: makes them, once.
        """
        if not self.stands:
            sums, self._sums, self.stands = self._sums, new(), True
            if not self._is_empty:
                copy_all(self._sums, sums)
        if self._is_empty:
            fill_with_nothing(self._sums)
            self._is_empty = False
        return self._sums

    def take(self) -> list[Tensor] | None:
        """The sums, which are then forgotten; None if nothing was added."""
        if self._is_empty:
            return None
        sums, self._is_empty = self._sums, True
        if not self.stands:
            self._sums = []
        return sums


def owned_results(action: ActionGraph, kind: SlotKind) -> tuple[bool, ...]:
    """For each output of that kind whether nothing else has its memory.

    Read off the schemas of operators: what has none counts as sharing.
    """
    results = action.result_nodes()
    found: dict[Node, frozenset[_Origin]] = {}
    origins = [_origins(result, found) for result in results]
    num_of = Counter(origin for each in origins for origin in each)
    return tuple(
        len(of) == 1
        and all(num_of[node, item] == 1 and node.op == "call_function" for node, item in of)
        and not _overlaps_itself(result.meta["val"])
        for slot, result, of in zip(action.outputs, results, origins, strict=True)
        if slot.kind == kind
    )


_Origin = tuple[Node, int | None]
"""The operator that made a piece of memory, and which of its results it is."""


def _origins(node: Node, found: dict[Node, frozenset[_Origin]]) -> frozenset[_Origin]:
    """Whose memory a value may have. Recursion as deep as views stand on views."""
    if node in found:
        return found[node]
    source, item = node, None
    if node.target is getitem and isinstance(node.args[1], int):
        (source,), item = node.all_input_nodes, node.args[1]
    shared = list(shared_nodes(source))
    found[node] = frozenset({(source, item)}).union(*(_origins(each, found) for each in shared))
    if shared:
        found[node] -= {(source, item)}
    return found[node]


def _overlaps_itself(value: Tensor) -> bool:
    """Whether two elements may have one place in memory."""
    extent: int | torch.SymInt = 1
    for size, stride in sorted(
        zip(value.shape, value.stride(), strict=True), key=lambda pair: pair[1]
    ):
        if size == 1:
            continue
        if stride < extent:
            return True
        extent = stride * (size - 1) + extent
    return False
