"""Which layers are traced and which are stamped.

Layers that are alike come in runs, which may repeat with a period (attention of two kinds by
turns) and may begin late (dense layers before those with experts)::

    index    0  1  2  3  4  5  6  7  8  9
    kind     D  M  M  M  M  M  M  M  M  M      period 1, run from 1
    part     .  h  1  s  s  s  s  s  2  t

The traced *units*, of one period each, are ``h`` (warm-up at the head), ``1`` and ``2`` (the
interior, of which the template is made), and ``t`` (warm-up at the tail), beside all that lies
outside of the run; ``s`` is stamped. ``PlannedLayers`` translates names between layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gt_trace.stamping.layer_list import LayerList
from gt_trace.stamping.report import NotStampable


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """A run of units of which some are stamped."""

    num_layers: int
    start: int
    """The first layer of the run of units."""

    period: int
    """How many layers make one unit."""

    num_units: int
    num_warm_up: int
    """How many units are traced at each end of the run, beside the two of the interior."""

    @property
    def first(self) -> int:
        """The first unit of the interior."""
        return self.num_warm_up

    @property
    def last(self) -> int:
        """The last unit of the interior."""
        return self.num_units - self.num_warm_up - 1

    @property
    def marked_units(self) -> tuple[int, int, int]:
        """The units at whose beginnings the trace is cut: the interior's, and the one after."""
        return self.first, self.last, self.last + 1

    @property
    def num_stamped(self) -> int:
        """Units that are not traced."""
        return self.last - self.first - 1

    def layer(self, unit: int) -> int:
        """The first layer of a unit."""
        return self.start + unit * self.period

    def unit_of(self, layer: int) -> int:
        """The unit that a layer belongs to; below 0 and from ``num_units`` on: outside."""
        return (layer - self.start) // self.period

    def is_interior(self, layer: int | None) -> bool:
        """Whether the layer is one of which the template is made, or that is stamped."""
        return layer is not None and self.first <= self.unit_of(layer) <= self.last

    @property
    def kept(self) -> tuple[int, ...]:
        """The layers that are traced."""
        stamped = range(self.layer(self.first + 1), self.layer(self.last))
        return tuple(index for index in range(self.num_layers) if index not in stamped)


def plan_layers(kinds: Sequence[int], *, num_warm_up: int = 1) -> LayerPlan:
    """The plan that stamps most layers.

    Raises:
        NotStampable: no run is long enough to stamp a layer.
    """
    best: LayerPlan | None = None
    traced = 2 * num_warm_up + 2
    for period in range(1, len(kinds) // (traced + 1) + 1):
        for start, length in _runs(kinds, period):
            plan = LayerPlan(
                num_layers=len(kinds),
                start=start,
                period=period,
                num_units=length // period,
                num_warm_up=num_warm_up,
            )
            most = 0 if best is None else best.num_stamped * best.period
            if plan.num_stamped * period > most:
                best = plan
    if best is None:
        raise NotStampable(
            f"of {len(kinds)} layers, no more than {traced} that are alike repeat in a row"
        )
    return best


def _runs(kinds: Sequence[int], period: int) -> list[tuple[int, int]]:
    """Longest stretches in which each layer equals the one a period later: (start, length)."""
    runs: list[tuple[int, int]] = []
    start = 0
    for index in range(len(kinds)):
        if index + period >= len(kinds) or kinds[index] != kinds[index + period]:
            runs.append((start, min(index + period, len(kinds)) - start))
            start = index + 1
    return runs


@dataclass(frozen=True, slots=True)
class PlannedLayers:
    """A list of layers, and the plan by which some of them are stamped."""

    layers: LayerList
    plan: LayerPlan

    def counterpart(self, layer: int, unit: int | None = None) -> int:
        """The layer at the same place of ``unit``, of the first interior one by default."""
        plan = self.plan
        first = plan.layer(plan.first if unit is None else unit)
        return first + (layer - plan.start) % plan.period

    def counterpart_name(self, name: str, unit: int | None = None) -> str:
        """What ``name``, which lies in a layer, is called in its counterpart."""
        layer, own = self.layers.split(name)
        assert layer is not None
        return self.layers.name(self.counterpart(layer, unit)) + own

    def is_interior(self, name: str) -> bool:
        """Whether the name lies in a layer that is stamped, or of which the template is made."""
        return self.plan.is_interior(self.layers.index_of(name))

    def in_unit(self, value: Any, unit: int) -> Any:
        """What the first interior unit holds, with the layers of ``unit`` in its texts."""
        return self.layers.shifted(value, (unit - self.plan.first) * self.plan.period)

    def in_last(self, value: Any) -> Any:
        """As ``in_unit``, for the last interior unit."""
        return self.in_unit(value, self.plan.last)
