"""The layers of a model and which of them are stamped: what a layer's names are in another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gt_trace.stamping.layer_list import LayerList
from gt_trace.stamping.layer_plan import LayerPlan


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
