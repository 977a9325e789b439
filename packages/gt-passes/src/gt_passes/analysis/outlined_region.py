"""Regions: a part of a graph that runs as one call, and still knows what it stands for.

A compiler or a CUDA graph replaces many nodes by one call. The call keeps the nodes as its *body*:
on fake tensors the body runs, so that the verifier checks it as before; on real ones its runner.
Whoever looks at a graph after compilation (a digest of collectives, a report) finds the bodies with
``region_of``. In the graph, a region is

::

    region = get_attr("inductor_region_0")
    call = run_region(region, x, y)
    a = getitem(call, 0)
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from gt_config.node_keys import ModuleAnnotation, PhaseAnnotation
from gt_passes._torch_compilation_internals import fake_mode_is_active
from gt_passes._torch_internals import (
    fake_mode_of,
    graph_module_without_code,
    is_fake_tensor,
    value_of,
)
from gt_passes.analysis.node_calls import attribute_of
from gt_trace.node_metadata import copy_annotations, read_annotation, write_annotation

Runner = Callable[..., Sequence[Any]]
"""Takes the plain tensors of the body's placeholders, returns its outputs, a tensor each."""


class OutlinedRegion(nn.Module):
    """What a call of ``run_region`` runs.

    Args:
        body: the nodes as they were; its one output is a tuple.
        runner: does what the body does, faster.
    """

    def __init__(self, body: GraphModule, runner: Runner) -> None:
        super().__init__()
        # In tuples, so that the body is no submodule: its parts are not those of the outer graph,
        # which GraphModule.delete_all_unused_submodules would otherwise tidy away.
        self._body = (body,)
        self._runner = (runner,)

    @property
    def body(self) -> GraphModule:
        """The nodes as they were."""
        return self._body[0]

    @property
    def runner(self) -> Runner:
        """What runs instead."""
        return self._runner[0]

    def forward(self, *args: Any) -> Sequence[Any]:
        """Run the region: the body on fake tensors, the runner on real ones."""
        tensor = next((value for value in args if isinstance(value, torch.Tensor)), None)
        if is_fake_tensor(tensor) or (tensor is None and fake_mode_is_active()):
            return tuple(self.body(*args))
        return self.runner(*args)

    def __deepcopy__(self, memo: dict[int, object]) -> OutlinedRegion:
        """Return itself: neither a region nor what was compiled from it ever changes."""
        return self


def run_region(region: OutlinedRegion, *args: Any) -> Sequence[Any]:
    """Run a region; the target of the node that stands for it."""
    outputs: Sequence[Any] = region(*args)
    return outputs


def region_of(node: Node) -> OutlinedRegion | None:
    """The region that a node calls; None for any other node."""
    if node.target is not run_region:
        return None
    graph_module = node.graph.owning_module
    assert graph_module is not None  # nobody calls a region in a graph without its module
    region = graph_module.get_submodule(str(node.all_input_nodes[0].target))
    assert isinstance(region, OutlinedRegion)
    return region


def only_region(graph_module: GraphModule) -> OutlinedRegion | None:
    """Return the region that does all the work of a graph, as one compiled whole does, or None.

    The values that such a graph holds while it runs are those of the region's body.
    """
    calls = [
        node
        for node in graph_module.graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    ]
    return region_of(calls[0]) if len(calls) == 1 else None


def region_inputs(call: Node) -> tuple[Node, ...]:
    """What a call of a region gives to the placeholders of its body, in their order."""
    return tuple(argument for argument in call.args[1:] if isinstance(argument, Node))


def nodes_with_bodies(graph_module: GraphModule) -> Iterator[Node]:
    """Every node in execution order, each region followed by its body's nodes, at any depth."""
    for node in graph_module.graph.nodes:
        yield node
        region = region_of(node)
        if region is not None:
            yield from nodes_with_bodies(region.body)


def inline_regions(graph_module: GraphModule) -> GraphModule:
    """Return the graph with each region's nodes in place of its call.

    Returns the module itself if it calls no region. The nodes of a new one share the metadata of
    those that they represent.
    """
    if not graph_module.graph.find_nodes(op="call_function", target=run_region):
        return graph_module
    graph = Graph()
    attributes: dict[str, object] = {}
    _inline(graph_module, None, graph, attributes)
    return graph_module_without_code(attributes, graph)


def _inline(
    source: GraphModule,
    inputs: Sequence[Any] | None,
    graph: Graph,
    attributes: dict[str, object],
) -> Any:
    """Add the nodes of a module to a graph; return what the module returns if it has inputs."""
    given = iter(inputs or ())
    made: dict[Node, Any] = {}
    for node in source.graph.nodes:
        args = map_arg(node.args, made.__getitem__)
        region = region_of(node)
        if region is not None:
            made[node] = _inline(region.body, args[1:], graph, attributes)
        elif node.op == "placeholder" and inputs is not None:
            made[node] = next(given)
        elif node.op == "output" and inputs is not None:
            return args[0]
        elif node.target is operator.getitem and isinstance(args[0], tuple):
            made[node] = args[0][args[1]]
        else:
            target = node.target
            if node.op == "get_attr":
                value = attribute_of(source, node)
                if isinstance(value, OutlinedRegion):
                    made[node] = None
                    continue
                if attributes.setdefault(target, value) is not value:
                    target = f"{target}_{len(attributes)}"
                    attributes[target] = value
            kwargs = map_arg(node.kwargs, made.__getitem__)
            made[node] = graph.create_node(node.op, target, args, kwargs, name=node.name)
            made[node].meta = node.meta
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Nodes that are to become a region, and what crosses its border."""

    nodes: tuple[Node, ...]
    """In an order of execution."""

    anchor: Node
    """The one of them behind which the region runs."""

    inputs: tuple[Node, ...]
    """What they read from outside, in the order of first use. Subgraphs of higher-order operators,
    and regions, are not inputs: they go into the body."""

    outputs: tuple[Node, ...]
    """Those of the nodes that anything outside reads, in execution order."""


class RegionOutliner:
    """Makes regions out of nodes of one graph.

    ::

        outliner = RegionOutliner(graph_module)
        outline = outliner.outline(nodes)
        region = OutlinedRegion(outliner.body(outline), runner)
        outliner.replace(outline, region, stem="inductor_region")
        outliner.finish()  # only now does anything read the regions

    Linear in the size of the graph, however many regions there are.
    """

    def __init__(self, graph_module: GraphModule) -> None:
        self._graph_module = graph_module
        self._fake_mode = fake_mode_of(graph_module.graph)
        self._names: dict[OutlinedRegion, str] = {}
        self._replacements: dict[Node, Node] = {}
        self._outlined: list[Node] = []

    def outline(self, nodes: Sequence[Node], *, anchor: Node | None = None) -> Outline:
        """Find what crosses the border of ``nodes``.

        Args:
            nodes: calls, in an order of execution. Results that are tuples stay inside.
            anchor: one of them, such that running all of them there changes nothing; by default
                the last.
        """
        members = set(nodes)
        inputs: dict[Node, None] = {}
        for node in nodes:
            for argument in node.all_input_nodes:
                if argument not in members and not self._is_subgraph(argument):
                    inputs[argument] = None
        outputs = [node for node in nodes if any(user not in members for user in node.users)]
        return Outline(
            nodes=tuple(nodes),
            anchor=nodes[-1] if anchor is None else anchor,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
        )

    def body(self, outline: Outline) -> GraphModule:
        """The nodes as a graph of their own: a function of the inputs that returns the outputs."""
        graph = Graph()
        copies: dict[Node, Node] = {}
        subgraphs: dict[str, Any] = {}
        for source in outline.inputs:
            copies[source] = graph.placeholder(source.name)
            copies[source].meta = {"val": self._value(source)}
        for node in outline.nodes:
            for argument in node.all_input_nodes:
                if argument not in copies:  # a subgraph, as outline has seen
                    name = str(argument.target)
                    subgraphs[name] = attribute_of(self._graph_module, argument)
                    copies[argument] = graph.node_copy(argument)
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in outline.outputs))
        return GraphModule(subgraphs, graph)

    def replace(self, outline: Outline, region: OutlinedRegion, *, stem: str) -> Node:
        """Put a call of the region behind its anchor, and return it.

        Args:
            outline: of nodes that no other region has taken.
            region: with the outline's inputs and outputs; several calls may share one.
            stem: what the name of the attribute that holds the region begins with.
        """
        graph = self._graph_module.graph
        with graph.inserting_after(outline.anchor):
            attribute = graph.get_attr(self._name(region, stem))
        with graph.inserting_after(attribute):
            call = graph.call_function(run_region, (attribute, *outline.inputs))
        _annotate(call, outline.nodes)
        call.meta["val"] = tuple(value_of(node) for node in outline.outputs)
        latest = call
        for position, node in enumerate(outline.outputs):
            with graph.inserting_after(latest):
                latest = graph.call_function(operator.getitem, (call, position))
            copy_annotations(node, latest)
            latest.meta["val"] = value_of(node)
            self._replacements[node] = latest
        self._outlined += outline.nodes
        return call

    def finish(self) -> None:
        """Let every reader read the regions, and erase the nodes that went into them."""
        outlined = set(self._outlined)
        graph = self._graph_module.graph
        for node in graph.nodes:
            if node not in outlined and any(
                argument in self._replacements for argument in node.all_input_nodes
            ):
                node.args = map_arg(node.args, self._current)
                node.kwargs = map_arg(node.kwargs, self._current)
        # Those that read come after those that are read, in every region; a later region may read
        # an earlier one, and its nodes still do until they are gone.
        for node in reversed([node for node in graph.nodes if node in outlined]):
            graph.erase_node(node)
        self._drop_unused_attributes()
        self._replacements.clear()
        self._outlined.clear()

    def _drop_unused_attributes(self) -> None:
        """Take away the subgraphs that have moved into bodies."""
        attributes = self._graph_module.graph.find_nodes(op="get_attr")
        used = {node.target for node in attributes if node.users}
        for node in attributes:
            if not node.users:
                self._graph_module.graph.erase_node(node)
                if node.target not in used:
                    self._graph_module.delete_submodule(str(node.target))

    def _name(self, region: OutlinedRegion, stem: str) -> str:
        if region not in self._names:
            numbers = itertools.count(len(self._names))
            name = next(
                name
                for name in (f"{stem}_{number}" for number in numbers)
                if not hasattr(self._graph_module, name)
            )
            self._graph_module.add_submodule(name, region)
            self._names[region] = name
        return self._names[region]

    def _current(self, node: Node) -> Any:
        return self._replacements.get(node, node)

    def _is_subgraph(self, node: Node) -> bool:
        return node.op == "get_attr" and isinstance(
            attribute_of(self._graph_module, node), nn.Module
        )

    def _value(self, node: Node) -> object:
        value = value_of(node)
        if value is None and node.op == "get_attr":
            value = attribute_of(self._graph_module, node)  # a constant, which tracing leaves real
        if isinstance(value, torch.Tensor) and not is_fake_tensor(value):
            assert self._fake_mode is not None  # or there would be no fake value to outline
            return self._fake_mode.from_tensor(value, static_shapes=True)
        return value


def _annotate(call: Node, nodes: Sequence[Node]) -> None:
    """Give a call what its nodes agree on: their phase, and their module."""
    for concept in (PhaseAnnotation, ModuleAnnotation):
        annotations = {read_annotation(node, concept) for node in nodes}
        agreed = annotations.pop() if len(annotations) == 1 else None
        if agreed is not None:
            write_annotation(call, agreed)
