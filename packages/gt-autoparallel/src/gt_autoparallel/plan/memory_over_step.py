"""What a rank's memory holds while a step runs: for each layer forward and backward, by kind.

As a plan counts it (``prices.memory``): what a layer saves is there from its forward to the end of
its backward, what it computes again and what is gathered ahead during its backward, what the loss
takes between the two, and everything else all the time; a layer's gradients from its backward on,
and those of microbatches before. What is in flight when they are reduced is not drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gt_autoparallel.graph.layer_names import window_name
from gt_autoparallel.graph.layer_turns import computing_nodes
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.prices.layer_memory import layer_memory

_FORWARD, _BACKWARD = " forward", " backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAt:
    """Bytes of a rank at the end of a forward window, or at the beginning of a backward one."""

    window: str
    """``"layers.3 forward"``: as ``PlannedWindow.name``; or ``"loss"``."""

    parts: Mapping[str, int]
    """By kind, as ``MemoryBreakdown.parts``."""

    @property
    def total(self) -> int:
        """Sum of all kinds."""
        return sum(self.parts.values())


def memory_over_step(plan: PlacementPlan) -> tuple[MemoryAt, ...]:
    """The windows of forward and backward in the order in which they run.

    Of layers that run more than once, as they begin in the forward and end in the backward.
    """
    of_layers = layer_memory(
        plan.graph,
        plan.options,
        plan.mesh,
        recomputed=plan.recomputed,
        microbatches=plan.request.microbatches,
    )
    saved = 0
    found = []
    forward, backward = _windows_in_order(plan)
    for window in forward:
        saved += of_layers.saved.get(window.removesuffix(_FORWARD), 0)
        found.append(_at(window, plan.memory.at_loss, saved))
    if plan.memory.loss:
        found.append(_at("loss", plan.memory.at_loss, saved, loss=plan.memory.loss))
    to_come = sum(of_layers.gradients.values())
    for window in backward:
        layer = window.removesuffix(_BACKWARD)
        to_come -= of_layers.gradients.get(layer, 0)
        again, ahead = (of.get(layer, 0) for of in (of_layers.again, of_layers.ahead))
        gradients = plan.memory.gradients - to_come
        moment = {**plan.memory.in_backward, "gradients": gradients}
        found.append(_at(window, moment, saved, recomputed=again, ahead=ahead))
        saved -= of_layers.saved.get(layer, 0)
    return tuple(found)


def _windows_in_order(plan: PlacementPlan) -> tuple[list[str], list[str]]:
    """Names of windows of the forward and of the backward; what computes nothing stands first."""
    place: dict[str, int] = {}
    computing = computing_nodes(plan.graph)
    for node in reversed(computing["forward"]):
        place[window_name(node)] = node.index
    for node in computing["backward"]:
        place[window_name(node)] = node.index
    names = sorted((window.name for window in plan.windows), key=lambda name: place.get(name, 0))
    return (
        [name for name in names if name.endswith(_FORWARD)],
        [name for name in names if name.endswith(_BACKWARD)],
    )


def _at(
    window: str,
    moment: Mapping[str, int],
    saved: int,
    *,
    loss: int = 0,
    recomputed: int = 0,
    ahead: int = 0,
) -> MemoryAt:
    """What there is all the time, as at a ``moment`` of the plan, with what comes and goes."""
    passing = {"loss": loss, "recomputed": recomputed, "gathered ahead": ahead}
    parts = {**moment, "saved activations": saved, **passing}
    always = ("parameters", "optimizer state", "saved activations")
    return MemoryAt(
        window=window, parts={kind: size for kind, size in parts.items() if size or kind in always}
    )
