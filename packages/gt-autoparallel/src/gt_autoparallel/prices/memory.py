"""Bytes that a placed model takes on each rank: of single choices, and of a whole plan.

Most is there at one of three moments, of which the fullest one counts:

    at the loss       parameters + optimizer state + what the forward saves for the backward
                      + the loss + gradients of microbatches before
    in the backward   parameters + optimizer state + what is saved then + gradients that are there
                      + what one layer computes again + what is gathered ahead of the next one
    at a reduction    parameters + optimizer state + what is saved then, without what the layer had
                      whose backward ends + gradients that are there
                      + what is in flight: that layer's gradients before they are reduced, twice,
                      since a bucket is a copy, and what is gathered ahead

The last two are those of the layer where most is there (``layer_memory``).

Saved is each storage that a forward node makes and a backward node reads, whole and once, however
many values lie in it and however small a part of it they are (``saved_storages``). Gathered
parameters that the backward reads are among them, since one gathering serves forward and backward
unless it is recomputed; then the next layer's are gathered while one computes, which is counted as
if that were as large. What is computed again is not saved, and what that reads is. Routed experts
say themselves what they keep.

Of a graph that runs for several microbatches (``microbatches``), what is saved is there for each
live one and gathered parameters once; gradients are the sums that wait for their reduction, and
nothing is in flight.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.placement_graph import PlacementGraph
from gt_autoparallel.prices.layer_memory import layer_memory
from gt_autoparallel.prices.microbatches import Microbatches, accumulated_gradients
from gt_autoparallel.prices.node_memory import gradient_bytes, layout_bytes

_MARGIN = 0.1
"""Share of a device's memory that no plan may count on. It is for what a plan does not count:
results of operators that nobody saves, gradients of activations, what an allocator loses between
blocks."""


def device_budget_bytes(capacity_bytes: int) -> int:
    """What a plan may take of a device: all of its memory but a tenth."""
    return int(capacity_bytes * (1.0 - _MARGIN))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Bytes on each rank, of all that is there at the loss or in the backward."""

    parameters: int
    gradients: int
    """At the end of the backward; with those of microbatches before, where they are kept apart."""

    optimizer_state: int
    saved_activations: int
    """Forward values that the backward reads, each storage once."""

    recomputed: int = 0
    """What a layer computes again at the fullest moment of the backward: in the turn of that layer,
    or as if no layer had had its turn."""

    loss: int = 0
    """What the loss takes, which is let go before the first layer's backward."""

    gradients_before: int = 0
    """Those of microbatches before, which are there at the loss."""

    gathered_ahead: int = 0
    """What is gathered then for the next layer."""

    in_flight: int = 0
    """At the fullest reduction, where a layer's backward ends: its gradients before they are
    reduced, and what is gathered ahead."""

    let_go_in_backward: int = 0
    """Of the saved activations what is gone at the fullest moment of the backward."""

    to_come_in_backward: int = 0
    """Of the gradients what is not there yet then."""

    let_go_at_reduction: int = 0
    """Of the saved activations what is gone at the fullest reduction, those of its layer too."""

    to_come_at_reduction: int = 0
    """Of the gradients what is not there yet then."""

    @property
    def at_loss(self) -> dict[str, int]:
        """Bytes by kind, in words, when the loss is computed."""
        return self._parts(gradients=self.gradients_before, loss=self.loss)

    @property
    def in_backward(self) -> dict[str, int]:
        """Bytes by kind, in words, at the fullest moment of the backward."""
        return self._parts(
            gradients=self.gradients - self.to_come_in_backward,
            saved=self.saved_activations - self.let_go_in_backward,
            recomputed=self.recomputed,
            ahead=self.gathered_ahead,
        )

    @property
    def at_reduction(self) -> dict[str, int]:
        """Bytes by kind, in words, at the fullest reduction of a layer's gradients."""
        return self._parts(
            gradients=self.gradients - self.to_come_at_reduction,
            saved=self.saved_activations - self.let_go_at_reduction,
            in_flight=self.in_flight,
        )

    @property
    def parts(self) -> dict[str, int]:
        """Those of the fullest moment."""
        moments = (self.in_backward, self.at_loss, self.at_reduction)
        return max(moments, key=lambda parts: sum(parts.values()))

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self.parts.values())

    def _parts(
        self,
        *,
        gradients: int,
        saved: int | None = None,
        loss: int = 0,
        recomputed: int = 0,
        ahead: int = 0,
        in_flight: int = 0,
    ) -> dict[str, int]:
        """Nothing of what is not everywhere, where it is not there."""
        return {
            "parameters": self.parameters,
            **({"gradients": gradients} if gradients else {}),
            "optimizer state": self.optimizer_state,
            "saved activations": self.saved_activations if saved is None else saved,
            **({"loss": loss} if loss else {}),
            **({"recomputed": recomputed} if recomputed else {}),
            **({"gathered ahead": ahead} if ahead else {}),
            **({"in flight": in_flight} if in_flight else {}),
        }


def plan_memory(
    graph: PlacementGraph,
    options: Sequence[NodeOption],
    mesh: MeshShape,
    *,
    optimizer_state_copies: float,
    recomputed: Collection[int] = (),
    microbatches: Microbatches | None = None,
    loss_bytes: int = 0,
    accumulates_gradients: bool = False,
) -> MemoryBreakdown:
    """The bytes of a whole plan.

    ``options`` are the chosen ones of all nodes, ``recomputed`` the nodes that run again; the rest
    is as in ``ResolvedRequest``.
    """
    accumulated = None if microbatches is None else accumulated_gradients(graph)
    parameters = gradients = 0
    for node in graph.nodes:
        option = options[node.index]
        if node.kind == "parameter":
            parameters += layout_bytes(node.outputs[0], option.outputs[0], mesh)
        gradients += gradient_bytes(graph, node, option, mesh, accumulated=accumulated)
    of_layers = layer_memory(graph, options, mesh, recomputed=recomputed, microbatches=microbatches)
    copies = gradient_copies(microbatches, accumulates_gradients=accumulates_gradients)
    backward, reduction = of_layers.fullest_backward, of_layers.fullest_reduction
    if reduction is None:
        reduction = replace(backward, made=0)
    return MemoryBreakdown(
        parameters=parameters,
        gradients=int(gradients * copies.in_backward),
        optimizer_state=round(parameters * optimizer_state_copies),
        saved_activations=sum(of_layers.saved.values()),
        recomputed=backward.made,
        loss=loss_bytes,
        gradients_before=gradients * copies.at_loss,
        gathered_ahead=backward.ahead,
        let_go_in_backward=backward.let_go,
        to_come_in_backward=backward.to_come,
        in_flight=reduction.made,
        let_go_at_reduction=reduction.let_go,
        to_come_at_reduction=reduction.to_come,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCopies:
    """How often the gradients of all parameters are there, at two moments of a microbatch."""

    at_loss: int
    in_backward: float
    """The second ones are those of one microbatch, of which a graph counts its part."""


def gradient_copies(
    microbatches: Microbatches | None, *, accumulates_gradients: bool
) -> GradientCopies:
    """Those of the last microbatch of a step: the sums, and what is going to be added to them.

    ``accumulates_gradients`` says that whoever runs the graph adds them up.
    """
    if microbatches is not None:
        return GradientCopies(at_loss=1, in_backward=1 + 1 / microbatches.num_graphs)
    before = int(accumulates_gradients)
    return GradientCopies(at_loss=before, in_backward=1 + before)
