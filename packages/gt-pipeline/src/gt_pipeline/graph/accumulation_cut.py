"""A whole step's graph cut for several microbatches that gather and reduce once.

::

    first    state, arguments                    -> results, sums, gathered
    further  state, gathered, arguments, sums    -> results, sums
    last     state, gathered, arguments, sums    -> results, gradients

Each has forward, loss and backward of one microbatch, so that whatever runs on a whole step runs on
them. The first gathers what all read, where its own operators first need it, and the last reduces
the sums of all, as soon as it has added its part: both communicate beside compute. Sums are what
the reduction reads: gradients of whole parameters, in the dtype of the reduction. Each sum is a new
value and nothing is written to, so that additions may be moved and compiled as any operator.

Which nodes gather and which reduce, annotations say (``action_parts``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule, Node

from gt_config.node_keys import ANNOTATION_TYPES, PhaseAnnotation
from gt_passes import Verifier
from gt_passes.analysis.liveness import MemoryKind
from gt_pipeline.errors import StageCutError, StageGraphError
from gt_pipeline.graph.action_parts import SharedPart, assign_shared_parts
from gt_pipeline.graph.clean_up import clean_up
from gt_trace import TracedStep
from gt_trace.node_metadata import remove_annotation

MicrobatchRole = Literal["first", "further", "last"]

_WHAT = "the step cannot be cut into microbatches that share gathering and reduction"


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchGraph:
    """The graph of one of a step's microbatches."""

    role: MicrobatchRole
    graph_module: GraphModule
    static_input_names: tuple[str, ...]
    """Leading placeholders whose tensors are those of every microbatch: state, then gathered."""

    sum_names: tuple[str, ...]
    """Trailing placeholders for what is summed so far."""

    gathered_names: tuple[str, ...]
    """The placeholders for what was gathered."""

    @property
    def released_inputs(self) -> tuple[Node, ...]:
        """The placeholders of what ``AccumulatedStep`` lets go of when it runs the graph."""
        gathered = self.gathered_names if self.role == "last" else ()
        return self._placeholders(*self.sum_names, *gathered)

    @property
    def input_kinds(self) -> dict[Node, MemoryKind]:
        """Why placeholders are held that are neither state nor arguments."""
        gathered = self._placeholders(*self.gathered_names)
        kinds: dict[Node, MemoryKind] = dict.fromkeys(gathered, "gathered parameters")
        return {**kinds, **dict.fromkeys(self._placeholders(*self.sum_names), "outputs")}

    def _placeholders(self, *names: str) -> tuple[Node, ...]:
        graph = self.graph_module.graph
        return tuple(each for each in graph.find_nodes(op="placeholder") if each.name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationGraphs:
    """The graphs of a step of two or more microbatches."""

    traced: TracedStep
    """What they were cut from, and what says how their inputs and results are made."""

    num_microbatches: int
    num_results: int
    """Leading leaves of the step's output tree that each microbatch has of its own."""

    num_plain_results: int
    """Leading outputs of each graph, of which those leaves are made."""

    num_sums: int
    num_gathered: int
    first: MicrobatchGraph
    further: MicrobatchGraph | None
    """None in a step of two microbatches."""

    last: MicrobatchGraph

    @property
    def graphs(self) -> tuple[MicrobatchGraph, ...]:
        """Those that there are, in the order in which they run."""
        return tuple(each for each in (self.first, self.further, self.last) if each is not None)


def cut_accumulation(
    traced: TracedStep, *, num_results: int, num_microbatches: int, verify: bool = True
) -> AccumulationGraphs:
    """Cut a step for ``num_microbatches``, two or more; its own graph is only tidied.

    Args:
        traced: forward, loss and backward. Of its output leaves, the leading ``num_results`` belong
            to a microbatch, and all others are gradients, to be summed.
        num_results: see ``traced``.
        num_microbatches: of a step.
        verify: whether to verify what tidies, and every graph as cut.

    Raises:
        StageCutError: an annotated gathering needs what a microbatch makes, or a microbatch needs
            what is made of reduced gradients.
        StageGraphError: a graph is broken.
    """
    clean_up(traced, verify=verify)
    graphs = cut_tidied(traced, num_results=num_results, num_microbatches=num_microbatches)
    problems = [
        f"{each.role}: {problem}"
        for each in graphs.graphs
        if verify
        for problem in Verifier().verify(each.graph_module).problems
    ]
    if problems:
        raise StageGraphError(what="the step was cut wrongly", problems=problems)
    return graphs


def cut_tidied(
    traced: TracedStep, *, num_results: int, num_microbatches: int
) -> AccumulationGraphs:
    """As ``cut_accumulation``, of a step that it has tidied before, and with nothing verified.

    Raises:
        StageCutError: as for ``cut_accumulation``.
    """
    cut = _Cut(traced, num_results)
    return AccumulationGraphs(
        traced=traced,
        num_microbatches=num_microbatches,
        num_results=num_results,
        num_plain_results=cut.num_plain_results,
        num_sums=len(cut.summed),
        num_gathered=len(cut.gathered),
        first=cut.first(),
        further=cut.later("further") if num_microbatches > 2 else None,
        last=cut.later("last"),
    )


class _Cut:
    def __init__(self, traced: TracedStep, num_results: int) -> None:
        self._joint = traced.graph_module
        graph = self._joint.graph
        self._parts: Mapping[Node, SharedPart] = assign_shared_parts(self._joint, what=_WHAT)
        placeholders = graph.find_nodes(op="placeholder")
        self._state = placeholders[: traced.num_static_inputs]
        self._arguments = placeholders[traced.num_static_inputs :]
        outputs: Any = graph.output_node().args[0]
        layouts = traced.output_layouts
        self.num_plain_results = sum(
            1 if layout is None else layout.num_leaves for layout in layouts[:num_results]
        )
        self._results: list[Node | None] = list(outputs[: self.num_plain_results])
        self._gradients: list[Node | None] = list(outputs[self.num_plain_results :])
        self.gathered = [
            node
            for node, part in self._parts.items()
            if part == "UNSHARD" and any(self._parts.get(u) == "MICROBATCH" for u in node.users)
        ]
        is_shared = {*self._state, *self.gathered, *graph.find_nodes(op="get_attr")}
        self._reducing = {node for node, part in self._parts.items() if part == "REDUCE_GRAD"}
        read_to_reduce = (
            source
            for node in self._parts
            if node in self._reducing
            for source in node.all_input_nodes
        )
        unreduced = (node for node in self._gradients if node is not None)
        self.summed = [
            node
            for node in dict.fromkeys((*read_to_reduce, *unreduced))
            if self._parts.get(node, "MICROBATCH") == "MICROBATCH" and node not in is_shared
        ]
        problems = [
            f"{node}, a result of every microbatch, is made of reduced gradients"
            for node in self._results
            if node in self._reducing
        ]
        if problems:
            raise StageCutError(what=_WHAT, problems=problems)

    def first(self) -> MicrobatchGraph:
        """Gathers, and gives its gradients as they are."""
        copy = _Copy(self._joint)
        state = copy.take(self._state)
        copy.take(self._arguments)
        copy.compute(self._nodes_of("UNSHARD", "MICROBATCH"))
        sums = [copy.densely(node) for node in self.summed]
        gathered = [copy.of[node] for node in self.gathered]
        return MicrobatchGraph(
            role="first",
            graph_module=copy.finish([*copy.all_of(self._results), *sums, *gathered]),
            static_input_names=state,
            gathered_names=(),
            sum_names=(),
        )

    def later(self, role: Literal["further", "last"]) -> MicrobatchGraph:
        """Takes what was gathered and summed, and adds its gradients; the last reduces the sums."""
        copy = _Copy(self._joint)
        state = copy.take(self._state)
        gathered = copy.take(self.gathered)
        copy.take(self._arguments)
        sums = copy.take_sums(self.summed)
        if role == "last":
            copy.compute(self._nodes_of("MICROBATCH", "REDUCE_GRAD"), reading_sums=self._reducing)
            gradients = [copy.summed_or_reduced(node) for node in self._gradients]
        else:
            copy.compute(self._nodes_of("MICROBATCH"))
            gradients = [copy.total[node] for node in self.summed]
        return MicrobatchGraph(
            role=role,
            graph_module=copy.finish([*copy.all_of(self._results), *gradients]),
            static_input_names=(*state, *gathered),
            gathered_names=gathered,
            sum_names=sums,
        )

    def _nodes_of(self, *parts: SharedPart) -> list[Node]:
        return [
            node
            for node, part in self._parts.items()
            if part in parts or node.op == "get_attr"  # what nobody reads is dead code
        ]


class _Copy:
    """A graph of copies of some nodes of another one, in their order."""

    def __init__(self, source: GraphModule) -> None:
        self._source = source
        self._graph = Graph()
        self.of: dict[Node, Node] = {}
        self._sum_so_far: dict[Node, Node] = {}
        self.total: dict[Node, Node] = {}
        """By what is summed, the sum with this microbatch's part."""

    def take(self, nodes: Iterable[Node]) -> tuple[str, ...]:
        """Placeholders for values that others make; their names."""
        names = []
        for node in nodes:
            is_input = node.op == "placeholder"
            taken = self._placeholder(node.name if is_input else f"gathered_{node.name}")
            taken.meta = dict(node.meta) if is_input else {"val": node.meta["val"]}
            self.of[node] = taken
            names.append(taken.name)
        return tuple(names)

    def take_sums(self, nodes: Iterable[Node]) -> tuple[str, ...]:
        """Placeholders for sums so far; where a node is copied, its part is added."""
        for node in nodes:
            taken = self._placeholder(f"sum_{node.name}")
            taken.meta = {"val": _dense(node.meta["val"])}
            self._sum_so_far[node] = taken
        for node in [each for each in self.of if each in self._sum_so_far]:
            self._add(node)
        return tuple(taken.name for taken in self._sum_so_far.values())

    def compute(self, nodes: Iterable[Node], *, reading_sums: Collection[Node] = ()) -> None:
        """Copy nodes, of which some read the sums instead of their parts."""
        for node in nodes:
            of = self._with_sums if node in reading_sums else self.of.__getitem__
            self.of[node] = self._graph.node_copy(node, of)
            if node in self._sum_so_far:
                self._add(node)

    def densely(self, node: Node) -> Node:
        """The copy of a node, or a copy of its value where elements share memory.

        A sum is laid out in one way, whichever microbatch made it.
        """
        value = node.meta["val"]
        if _dense(value) is value:
            return self.of[node]
        dense = self._call(torch.ops.aten.clone.default, self.of[node], like=node)
        dense.meta["val"] = _dense(value)
        return dense

    def all_of(self, nodes: Iterable[Node | None]) -> list[Node | None]:
        """Copies of results, of which some are None."""
        return [None if node is None else self.of[node] for node in nodes]

    def summed_or_reduced(self, node: Node | None) -> Node | None:
        """What becomes of a gradient in the last microbatch."""
        return None if node is None else self._with_sums(node)

    def finish(self, results: Sequence[Node | None]) -> GraphModule:
        """The graph as a module, with the attributes of the source."""
        self._graph.output(tuple(results))
        return GraphModule(self._source, self._graph)

    def _placeholder(self, name: str) -> Node:
        placeholder = self._graph.placeholder(name)
        placeholder.target = placeholder.name
        return placeholder

    def _with_sums(self, node: Node) -> Node:
        return self.total[node] if node in self.total else self.of[node]

    def _add(self, node: Node) -> None:
        so_far, part = self._sum_so_far[node], self.of[node]
        total = self._call(torch.ops.aten.add.Tensor, so_far, part, like=node)
        total.meta["val"] = torch.ops.aten.add.Tensor(so_far.meta["val"], part.meta["val"])
        self.total[node] = total

    def _call(self, target: Any, *args: Node, like: Node) -> Node:
        call = self._graph.call_function(target, args)
        call.meta = dict(like.meta)
        # It belongs to all microbatches: not to a module, which may run in chunks of one, nor to
        # the reduction that reads the sum, which may be put in a bucket.
        for concept in ANNOTATION_TYPES:
            if concept is not PhaseAnnotation:
                remove_annotation(call, concept)
        return call


def _dense(value: torch.Tensor) -> torch.Tensor:
    """The value, or what a copy of it is where its elements share memory or leave gaps."""
    copied = torch.ops.aten.clone.default(value)
    return value if copied.stride() == value.stride() else copied
