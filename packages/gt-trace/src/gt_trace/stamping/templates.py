"""What two interior units agree on, and how to make it again for any unit.

A template is a constant, a reference, a name with the layer's index in it, or a container of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from gt_trace.stamping.planned_layers import PlannedLayers
from gt_trace.stamping.references import Reference
from gt_trace.stamping.report import NotStampable


@dataclass(frozen=True, slots=True)
class ConstantTemplate:
    """The same in every unit."""

    value: Any


@dataclass(frozen=True, slots=True)
class LayerText:
    """A text with indices of the layer list, as the first interior unit has it."""

    text: str


@dataclass(frozen=True, slots=True)
class Items:
    """A list or tuple."""

    is_list: bool
    items: tuple[Template, ...]


@dataclass(frozen=True, slots=True)
class Entries:
    """A dictionary."""

    entries: tuple[tuple[Any, Template], ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice; its three parts are templates."""

    parts: tuple[Template, Template, Template]


Template = ConstantTemplate | Reference | LayerText | Items | Entries | Slice


class TemplateMaker:
    """Makes templates of what two units hold, and values of templates.

    What two nodes mean is told by a function as ``ReferenceFinder.meant``.
    """

    def __init__(
        self, planned: PlannedLayers, meant: Callable[[Node, Node, str], Reference]
    ) -> None:
        self._planned = planned
        self._meant = meant

    def make(self, ours: Any, theirs: Any, where: str) -> Template:
        """The template of which ``ours`` is the first unit's value and ``theirs`` the last's.

        Raises:
            NotStampable: there is none.
        """
        if isinstance(ours, Node) and isinstance(theirs, Node):
            return self._meant(ours, theirs, where)
        if type(ours) is not type(theirs):
            raise NotStampable(f"{where}: {ours!r} and {theirs!r} are of other kinds")
        if isinstance(ours, list | tuple) and len(ours) == len(theirs):
            items = tuple(self.make(a, b, where) for a, b in zip(ours, theirs, strict=True))
            if all(isinstance(item, ConstantTemplate) for item in items):
                return ConstantTemplate(ours)
            return Items(isinstance(ours, list), items)
        if isinstance(ours, Mapping) and list(ours) == list(theirs):
            return Entries(tuple((key, self.make(ours[key], theirs[key], where)) for key in ours))
        if isinstance(ours, slice):
            one, two, three = (
                self.make(getattr(ours, part), getattr(theirs, part), where)
                for part in ("start", "stop", "step")
            )
            return Slice((one, two, three))
        if isinstance(ours, str) and self._planned.in_last(ours) == theirs:
            return ConstantTemplate(ours) if ours == theirs else LayerText(ours)
        if _same_constant(ours, theirs):
            return ConstantTemplate(ours)
        raise NotStampable(f"{where}: {ours!r} in one layer is {theirs!r} in another")

    def value(self, template: Template, unit: int, resolve: Callable[[Reference], Node]) -> Any:
        """What the template is in ``unit``; containers are new ones, ``resolve`` finds nodes."""
        if isinstance(template, ConstantTemplate):
            return template.value
        if isinstance(template, Reference):
            return resolve(template)
        if isinstance(template, Items):
            items = [
                item.value
                if isinstance(item, ConstantTemplate)
                else self.value(item, unit, resolve)
                for item in template.items
            ]
            return items if template.is_list else tuple(items)
        if isinstance(template, Entries):
            return {key: self.value(each, unit, resolve) for key, each in template.entries}
        if isinstance(template, LayerText):
            return self._planned.in_unit(template.text, unit)
        return slice(*(self.value(part, unit, resolve) for part in template.parts))


def _same_constant(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, float):
        return ours.hex() == float(theirs).hex()
    return ours is theirs or bool(ours == theirs)
