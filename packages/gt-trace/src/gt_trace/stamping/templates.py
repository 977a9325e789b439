"""What two interior units agree on, and how to make it again for any unit.

A template is a constant, a reference, a name with the layer's index in it, or a container of these.
The template of a node has operator, operands and metadata.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from gt_trace._torch_internals import HigherOrderOperator, OpOverload
from gt_trace.stamping.compare_steps import same_constant
from gt_trace.stamping.fake_values import StoragePlan, ValueMaker
from gt_trace.stamping.layer_plan import PlannedLayers
from gt_trace.stamping.references import Reference, ReferenceFinder
from gt_trace.stamping.report import NotStampable
from gt_trace.stamping.short_graph import ShortGraph
from gt_trace.stamping.subgraphs import require_like_subgraphs


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


_VALUES = ("val", "eager_input_vals")
_MADE_ANEW = frozenset({*_VALUES, "custom", "seq_nr", "tensor_meta", "unbacked_bindings"})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTemplate:
    """What two nodes at the same place of two interior units agree on."""

    ours: Node
    """The node in the first interior unit."""

    theirs: Node
    """The node at the same place in the last interior unit."""

    args: Template
    kwargs: Template
    annotations: tuple[tuple[str, Template], ...]
    """What is annotated, with its key. Equal annotations of several nodes have the same
    template."""

    values: tuple[tuple[str, tuple[StoragePlan, ...]], ...]
    """Keys of the node's metadata that hold fake tensors, and for each tensor whose memory it lies
    in."""


class NodeTemplates:
    """Makes templates of nodes."""

    def __init__(self, short: ShortGraph, values: ValueMaker) -> None:
        self._short = short
        self._finder = ReferenceFinder(short)
        self._values = values
        self._known_annotations: dict[tuple[str, str, str], Template] = {}
        self.maker = TemplateMaker(short.planned, self._finder.meant)

    def make(self, ours: Node, theirs: Node) -> NodeTemplate:
        """The template of two nodes.

        Raises:
            NotStampable: they differ, or what they share is ambiguous.
        """
        where = f"{ours.name} and {theirs.name}"
        if ours.op == "get_attr" and theirs.op == "get_attr":
            self._check_attributes(ours, theirs, where)
        elif ours.op != "call_function" or ours.target is not theirs.target:
            raise NotStampable(f"{where}: {ours.target} and {theirs.target}")
        if ours.meta.keys() != theirs.meta.keys():
            raise NotStampable(f"{where}: other kinds of metadata")
        for key in ours.meta.keys() - _MADE_ANEW:
            _require_constant(ours.meta[key], theirs.meta[key], f"{where}: {key}")
        return NodeTemplate(
            ours=ours,
            theirs=theirs,
            args=self.maker.make(ours.args, theirs.args, where),
            kwargs=self.maker.make(ours.kwargs, theirs.kwargs, where),
            annotations=self._annotations(ours, theirs, where),
            values=tuple(
                (
                    key,
                    self._values.plan(
                        ours.meta[key],
                        theirs.meta[key],
                        lambda a, b: self._finder.meant(a, b, f"{where}: memory"),
                        where,
                    ),
                )
                for key in _VALUES
                if key in ours.meta
            ),
        )

    def output(self, ours: Any, theirs: Any, where: str) -> Template:
        """The template of something that the graph returns for each unit."""
        meant = functools.partial(self._finder.meant, is_output=True)
        return TemplateMaker(self._short.planned, meant).make(ours, theirs, where)

    def _check_attributes(self, ours: Node, theirs: Node, where: str) -> None:
        short = self._short
        held, other = short.attribute(ours), short.attribute(theirs)
        if not isinstance(held, GraphModule) or not isinstance(other, GraphModule):
            raise NotStampable(f"{where}: a tensor literal inside of a layer")
        if (ours.name, theirs.name) != (ours.target, theirs.target):
            raise NotStampable(f"{where}: named otherwise than {ours.target} and {theirs.target}")
        require_like_subgraphs(held, other, short.planned, where)

    def _annotations(
        self, ours: Node, theirs: Node, where: str
    ) -> tuple[tuple[str, Template], ...]:
        held, others = ours.meta.get("custom", {}), theirs.meta.get("custom", {})
        if list(held) != list(others):
            raise NotStampable(f"{where}: annotated with {list(held)} and {list(others)}")
        found: list[tuple[str, Template]] = []
        for key, value in held.items():
            known = (key, repr(value), repr(others[key]))
            if known not in self._known_annotations:
                self._known_annotations[known] = self.maker.make(
                    value, others[key], f"{where}: annotation {key}"
                )
            found.append((key, self._known_annotations[known]))
        return tuple(found)


def _require_constant(ours: Any, theirs: Any, where: str) -> None:
    is_known = isinstance(ours, str | int | float | OpOverload | HigherOrderOperator)
    if ours is not theirs and not (is_known and same_constant(ours, theirs)):
        raise NotStampable(f"{where}: {ours!r} and {theirs!r}")
