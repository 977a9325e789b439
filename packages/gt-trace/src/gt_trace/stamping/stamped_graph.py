"""The graph of the whole model, made from that of the shortened one.

Before, with layers 0, 1, 8 and 9 traced (forward on the left, backward on the right)::

    0  1                 8  9 loss 9  8                 1  0

After::

    0  1  2 3 4 5 6 7  8  9 loss 9  8  7 6 5 4 3 2  1  0

Nodes of the head, the centre and the tail are taken over; those of 2 to 7 are made by templates, on
which 1 and 8 agree; 8 now reads 7 where it read 1, and 1's backward reads 2's where it read 8's.
Nothing of the traced graph is changed before all of it has succeeded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from gt_trace._torch_internals import add_node
from gt_trace.capture.fake_tensors import tensors_in
from gt_trace.capture.graph_inputs import GraphInput
from gt_trace.stamping.fake_values import StorageOwners, ValueMaker
from gt_trace.stamping.numbering import Names, Numbers
from gt_trace.stamping.references import Reference
from gt_trace.stamping.report import NotStampable, ReachesTooFar
from gt_trace.stamping.short_graph import ShortGraph
from gt_trace.stamping.subgraphs import copy_subgraph
from gt_trace.stamping.templates import NodeTemplate, NodeTemplates, Template
from gt_trace.stamping.unit_symbols import UnitSymbols, symbols_bound_by

InputKey = tuple[str, int]
"""Name of a state or argument, and the position of one plain tensor among those that it is made
of."""


class StampedGraph:
    """Stamps the graph of a shortened model.

    Inputs are of the whole model, in order, each with its fake tensor; ``num_unused`` gradients of
    one unit's parameters there are not.

    Raises:
        NotStampable: the interior units differ, or a reference is ambiguous.
    """

    def __init__(
        self,
        short: ShortGraph,
        *,
        inputs: Sequence[tuple[GraphInput, Any]],
        shape_env: Any,
        num_unused: int,
    ) -> None:
        self._short = short
        self._plan = short.plan
        self._planned = short.planned
        self._inputs = inputs
        first = short.body[short.first_forward : short.last_forward]
        last = short.body[short.last_forward : short.centre]
        self._symbols = UnitSymbols(shape_env, symbols_bound_by(first), symbols_bound_by(last))
        owners = StorageOwners([*short.inputs, *short.body])
        self._owners = owners
        self._values = ValueMaker(owners, self._symbols)
        self._templates = NodeTemplates(short, self._values)
        self._names = Names(short)
        self._numbers = Numbers(short, num_unused=num_unused)
        self._forward = [self._templates.make(a, b) for a, b in zip(first, last, strict=True)]
        self._backward = [
            self._templates.make(
                short.body[short.first_backward + offset], short.body[short.last_backward + offset]
            )
            for offset in range(short.backward_length)
        ]
        self._annotations: dict[tuple[int, int], Any] = {}
        self._replaced: dict[int, dict[Any, Any]] = {}
        self._body: list[Node] = []
        self._placeholders: dict[InputKey, Node] = {}
        self.graph = Graph()
        self.attributes: dict[str, Any] = {}
        """What ``get_attr`` nodes of the graph read, by target."""

    def build(self, outputs: Sequence[Any]) -> Graph:
        """Make the graph, with what ``kept_output`` or ``layer_output`` gave for each output.

        Raises:
            NotStampable: a kept node reads what only a traced layer has.
        """
        short, plan = self._short, self._plan
        self._check_kept()
        self._make_placeholders()
        for node in short.body[: short.last_forward]:
            self._take(node, node.name, node.meta["seq_nr"])
        for unit in range(plan.first + 1, plan.last):
            self._replaced[unit] = self._symbols.fresh()
            self._stamp(self._forward, unit, is_forward=True)
        self._keep(self._forward, plan.last, is_forward=True)
        for node in short.body[short.centre : short.last_backward]:
            self._take(node, self._names.in_centre(node), self._numbers.in_centre(node))
        self._keep(self._backward, plan.last, is_forward=False)
        for unit in range(plan.last - 1, plan.first, -1):
            self._stamp(self._backward, unit, is_forward=False)
        self._keep(self._backward, plan.first, is_forward=False)
        for node in short.body[short.tail :]:
            self._take(node, self._names.in_tail(node), self._numbers.in_tail(node))
        results = [made(self) for made in outputs]
        self._symbols.settle()
        output = self.graph.create_node("output", "output", (results,), name="output")
        output.meta = short.output.meta
        return self.graph

    def kept_output(self, value: Any, layer: int | None) -> Callable[[StampedGraph], Any]:
        """An output that is returned for a layer that is taken over, or for none.

        Raises:
            NotStampable: it is computed where only an interior layer's should be.
        """
        if isinstance(value, Node) and value.op != "placeholder":
            short, position = self._short, self._short.positions[value]
            is_head = layer is not None and layer < self._plan.layer(self._plan.first)
            allowed = (
                position < short.first_forward
                or position >= short.tail
                or (short.centre <= position < short.last_backward)
                or (is_head and position >= short.first_backward)
                or (layer is not None and not is_head and position < short.first_backward)
            )
            if not allowed:
                raise NotStampable(f"{value.name} is returned, and computed inside of a layer")
        return lambda stamped: stamped._kept(value)

    def layer_output(
        self, ours: Any, theirs: Any, unit: int, where: str
    ) -> Callable[[StampedGraph], Any]:
        """An output of ``unit``: ``ours`` in the first interior unit, ``theirs`` in the last."""
        template = self._templates.output(ours, theirs, where)
        return lambda stamped: stamped._templates.maker.value(
            template, unit, stamped._resolver(unit)
        )

    def _check_kept(self) -> None:
        """Nodes that are taken over must not read what is replaced between them."""
        short = self._short
        centre = range(short.centre, short.last_backward)
        for position in (*centre, *range(short.tail, len(short.body))):
            node = short.body[position]
            read = list(node.all_input_nodes)
            held = (node.meta.get("val"), node.meta.get("eager_input_vals"))
            read.extend(self._owners.of(tensor)[0] for tensor in tensors_in(held))
            for each in read:
                self._check_read(node, each, is_centre=position in centre)

    def _check_read(self, node: Node, read: Node, *, is_centre: bool) -> None:
        short = self._short
        if read.op == "placeholder":
            if self._planned.is_interior(short.inputs[read].name):
                raise ReachesTooFar(f"{node.name} reads {read.name}, of a layer that is stamped")
            return
        position = short.positions[read]
        nearest = (
            range(short.last_forward, short.centre)
            if is_centre
            else range(short.first_backward, short.tail)
        )
        own = range(short.centre, short.last_backward)
        first = range(short.first_forward, short.last_forward) if not is_centre else range(0)
        ends = position < short.first_forward or position >= short.tail
        if not (ends or position in nearest or position in own or position in first):
            raise ReachesTooFar(f"{node.name} reads {read.name}, of a layer that is stamped")

    def _make_placeholders(self) -> None:
        traced = {(given.name, given.leaf): node for node, given in self._short.inputs.items()}
        for index, (given, example) in enumerate(self._inputs):
            node = self.graph.create_node("placeholder", f"arg{index}_1", name=f"arg{index}_1")
            old = traced.get((given.name, given.leaf))
            if old is None:
                name = self._planned.counterpart_name(given.name)
                node.meta = {**traced[name, given.leaf].meta, "val": example}
            else:
                node.meta = old.meta
            self._placeholders[given.name, given.leaf] = node

    def _take(self, node: Node, name: str, number: int) -> None:
        target = node.target
        if node.op == "get_attr":
            held = self._short.attribute(node)
            target = name if isinstance(held, GraphModule) else str(target)
            self.attributes[target] = held
        made = self.graph.create_node(
            node.op,
            target,
            map_arg(node.args, self._kept_node),
            map_arg(node.kwargs, self._kept_node),
            name=name,
        )
        made.meta = {**node.meta, "seq_nr": number}
        self._body.append(made)

    def _kept(self, value: Any) -> Any:
        return self._kept_node(value) if isinstance(value, Node) else value

    def _kept_node(self, node: Node) -> Node:
        """What a node that is taken over became."""
        short, plan = self._short, self._plan
        if node.op == "placeholder":
            given = short.inputs[node]
            return self._placeholders[given.name, given.leaf]
        position = short.positions[node]
        added = 0
        if position >= short.last_forward:
            added += plan.num_stamped * short.forward_length
        if position >= short.first_backward:
            added += plan.num_stamped * short.backward_length
        return self._body[position + added]

    def _stamp(self, templates: Sequence[NodeTemplate], unit: int, *, is_forward: bool) -> None:
        """Add one unit that was not traced."""
        resolve = self._resolver(unit)
        replaced = self._replaced[unit]
        for template in templates:
            ours = template.ours
            node = self._node(template, unit, resolve, is_forward=is_forward)
            meta = node.meta
            meta.update(ours.meta)
            meta["seq_nr"] = self._number(template, unit, is_forward=is_forward)
            if "custom" in meta:
                meta["custom"] = self._annotation(template.annotations, unit)
            if "unbacked_bindings" in meta:
                meta["unbacked_bindings"] = {
                    replaced[symbol]: path
                    for symbol, path in ours.meta["unbacked_bindings"].items()
                }
            if "tensor_meta" in meta:
                meta["tensor_meta"] = self._values.shape_facts(meta["tensor_meta"], replaced)
            for key, plans in template.values:
                meta[key] = self._values.make(meta[key], plans, resolve, node, replaced)

    def _keep(self, templates: Sequence[NodeTemplate], unit: int, *, is_forward: bool) -> None:
        """Add an interior unit that was traced, reading its new neighbour."""
        resolve = self._resolver(unit)
        for template in templates:
            node = self._node(template, unit, resolve, is_forward=is_forward)
            traced = template.theirs if unit == self._plan.last else template.ours
            node.meta = {
                **traced.meta,
                "seq_nr": self._number(template, unit, is_forward=is_forward),
            }
            for key, plans in template.values:
                node.meta[key] = self._values.rehomed(traced.meta[key], plans, resolve, node)

    def _node(
        self,
        template: NodeTemplate,
        unit: int,
        resolve: Callable[[Reference], Node],
        *,
        is_forward: bool,
    ) -> Node:
        maker = self._templates.maker
        name = (
            self._names.in_forward(template.ours, unit)
            if is_forward
            else self._names.in_backward(template.theirs, unit)
        )
        target = template.ours.target
        if template.ours.op == "get_attr":
            target = name
            self.attributes[name] = self._subgraph(template, unit)
        node = add_node(
            self.graph,
            template.ours.op,
            target,
            maker.value(template.args, unit, resolve),
            maker.value(template.kwargs, unit, resolve),
            name=name,
        )
        self._body.append(node)
        return node

    def _subgraph(self, template: NodeTemplate, unit: int) -> GraphModule:
        """The traced one of a unit that was traced, or a copy."""
        traced = template.theirs if unit == self._plan.last else template.ours
        held: GraphModule = self._short.attribute(traced)
        if unit in (self._plan.first, self._plan.last):
            return held
        return copy_subgraph(held, self._planned, unit)

    def _number(self, template: NodeTemplate, unit: int, *, is_forward: bool) -> int:
        if is_forward:
            return self._numbers.in_forward(template.ours, unit)
        return self._numbers.in_backward(template.ours, template.theirs, unit)

    def _annotation(self, templates: Sequence[tuple[str, Template]], unit: int) -> dict[str, Any]:
        """The annotations of a node; what they hold is shared within the unit, as in a trace."""
        made: dict[str, Any] = {}
        for key, template in templates:
            known = (unit, id(template))
            if known not in self._annotations:
                self._annotations[known] = self._templates.maker.value(
                    template, unit, _no_reference
                )
            made[key] = self._annotations[known]
        return made

    def _resolver(self, unit: int) -> Callable[[Reference], Node]:
        """The node that a reference means in ``unit``."""
        short, plan, body = self._short, self._plan, self._body
        added = plan.num_stamped * short.forward_length
        begins = {
            "forward": short.first_forward + (unit - plan.first) * short.forward_length,
            "backward": short.last_backward + added + (plan.last - unit) * short.backward_length,
            "head": 0,
            "centre": short.centre + added,
            "tail": short.tail + added + plan.num_stamped * short.backward_length,
        }

        def resolve(reference: Reference) -> Node:
            begin = begins.get(reference.kind)
            if begin is not None:
                return body[begin + reference.offset]
            name = reference.name
            if reference.kind == "layer_input":
                name = self._planned.layers.name(plan.layer(unit) + reference.offset) + name
            return self._placeholders[name, reference.leaf]

        return resolve


def _no_reference(reference: Reference) -> Node:
    raise AssertionError(f"an annotation refers to a node: {reference}")
