"""Chunks made on the graph: a captured step in which chosen modules run once for each chunk.

The graph is written anew, operator by operator, on fake values. What stands outside of the chunked
modules is taken over; each chunked region runs once for each chunk, on that chunk's part of what
enters. Cuts and joins are lazy: a value is cut when a region first reads a whole one, and made
whole when somebody outside first reads it. So the backward of a chunk reads what its own forward
left, and chunked layers that follow each other pass chunks along; there are no joins between them.
No shape is rewritten by hand afterwards, and sizes that depend on data are new in every chunk.

Why states by rules and not a second trace with a symbolic extent, which tells as well which sizes
hold it: a rule needs no model, proves the join (a symbol in a shape says nothing about whether
``cat`` is right), and costs no second capture. What rules cannot know is written down in the
contract of expert-parallel regions; see ``gt_passes.ep_overlap.chunk_plan``.

Before (``y = module(x)`` with an exchange inside)::

    e = exchange(f(x));  y = g(e)

After, with two chunks::

    x0, x1 = split(x)
    e0 = exchange(f(x0));  y0 = g(e0)
    e1 = exchange(f(x1));  y1 = g(e1)
    y = cat(y0, y1)
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_aggregate

from gt_config import EpChunkDim
from gt_config.node_keys import ChunkAnnotation, ChunkRole, ModuleAnnotation, PhaseAnnotation
from gt_passes._torch_internals import FakeTensorMode, quiet_fake_execution, value_of
from gt_passes.analysis.collectives import is_collective, is_wait
from gt_passes.analysis.node_calls import evaluate
from gt_passes.analysis.symbol_bindings import bind_symbols_anew
from gt_passes.analysis.tensor_signature import signature
from gt_passes.ep_overlap.chunk_plan import ChunkPlan, plan_chunks
from gt_passes.ep_overlap.chunk_states import Layout, Partial, Sharded, State, Whole, layout_of
from gt_passes.ep_overlap.chunked_nodes import Region, find_chunked_nodes
from gt_passes.ep_overlap.rule_calls import Scaled
from gt_passes.errors import GraphChunkingError
from gt_trace.node_metadata import write_annotation
from gt_trace.stamping.shortened_sizes import ShortenedSizes

JoinKind = Literal["cat", "sum"]

aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A value that was made whole again."""

    unchunked: str
    """Name of the node that makes it in the unchunked graph."""

    joined: str
    """Name of the node that makes it now."""

    kind: JoinKind


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphChunks:
    """What chunking did."""

    regions: tuple[tuple[str, str], ...]
    """Module and direction of every region, in the order in which they run."""

    chunk_sizes: tuple[int, ...]
    joins: tuple[Join, ...]
    num_splits: int


def chunk_graph(
    graph_module: GraphModule,
    *,
    patterns: Sequence[str],
    fake_mode: FakeTensorMode,
    num_static_inputs: int,
    chunk_dim: EpChunkDim = "batch",
    num_chunks: int = 2,
    preserve_eager_order: bool = False,
) -> GraphChunks:
    """Run modules of a captured step in chunks, in place.

    Args:
        graph_module: captured by ``gt_trace.trace_step``, with expert-parallel regions annotated.
        patterns: of the names of modules to chunk, as ``layers.*.moe``.
        fake_mode: that of the recorded values.
        num_static_inputs: number of leading placeholders that hold parameters and buffers.
        chunk_dim: batch is dim 0 of the (batch, sequence, model) inputs of the modules, seq dim 1.
        num_chunks: whose sizes differ by at most one.
        preserve_eager_order: cast and sum gradients of parameters as the eager producer does, where
            each chunk casts before the sum. Costs memory.

    Raises:
        GraphChunkingError: the graph cannot be run in chunks. Where a rule refuses, the graph is as
            it was; where an operator fails on a chunk, it is half written and must not be used.
    """
    chunked = find_chunked_nodes(
        graph_module,
        patterns=patterns,
        chunk_dim=chunk_dim,
        num_static_inputs=num_static_inputs,
    )
    if not 2 <= num_chunks <= chunked.extent:
        raise GraphChunkingError(
            [f"{num_chunks} chunks of a {chunk_dim} of {chunked.extent}: allowed are 2 to as many"]
        )
    plan = plan_chunks(graph_module.graph, chunked, preserve_eager_order=preserve_eager_order)
    ends = [chunked.extent * index // num_chunks for index in range(num_chunks + 1)]
    sizes = tuple(end - start for start, end in itertools.pairwise(ends))
    with quiet_fake_execution(fake_mode, learns_sizes=True):
        writer = _Writer(graph_module.graph, plan, sizes, fake_mode.shape_env)
        writer.run()
    return GraphChunks(
        regions=tuple((region.root, region.direction) for region in plan.regions),
        chunk_sizes=sizes,
        joins=tuple(writer.joins.values()),
        num_splits=len(writer.parts),
    )


class _Writer:
    """Writes the graph anew, in its place: what runs once keeps its node."""

    def __init__(
        self, graph: Graph, plan: ChunkPlan, sizes: tuple[int, ...], shape_env: ShapeEnv | None
    ) -> None:
        self._graph = graph
        self._output = graph.output_node()
        self._plan = plan
        self._sizes = sizes
        self._evaluated = ExchangedValues(shape_env)
        self._region_of = {node: r for r, nodes in plan.regions.items() for node in nodes}
        self._whole: dict[Node, Node] = {}
        self._restrided: set[Node] = set()
        self._chunks: dict[Node, list[Node]] = {}
        self.parts: dict[tuple[Node, Layout], list[Node]] = {}
        self.joins: dict[Node, Join] = {}

    def run(self) -> None:
        """Write all of it, before the output and behind the nodes that it replaces."""
        for unit in self._plan.order:
            if isinstance(unit, Region):
                self._write_region(unit)
            else:
                self._write_outside(unit)
        for node in reversed(self._region_of):
            self._graph.erase_node(node)
        self._evaluated.restore(self._graph.nodes)

    # What runs once.

    def _write_outside(self, node: Node) -> None:
        for source in node.all_input_nodes:
            whole = self._make_whole(source)
            if whole is not source:
                node.replace_input_with(source, whole)
                # Joined values may have other strides, and so has then what is made of them.
                if signature(value_of(source)) != signature(value_of(whole)):
                    self._restrided.add(whole)
        if node.op == "output":
            return
        self._output.prepend(node)
        self._whole[node] = node
        if not self._restrided.isdisjoint(node.all_input_nodes):
            before = signature(value_of(node))
            node.meta["val"] = self._evaluated.value(node)
            bind_symbols_anew(node)
            if signature(value_of(node)) != before:
                self._restrided.add(node)

    def _make_whole(self, node: Node) -> Node:
        if node not in self._whole:
            self._whole[node] = self._join(node)
        return self._whole[node]

    # What runs in every chunk.

    def _write_region(self, region: Region) -> None:
        nodes = self._plan.regions[region]
        summed = [
            node
            for node in nodes
            if self._plan.outcomes[node].state == Partial()
            and any(user not in self._region_of for user in node.users)
        ]
        chunks = range(len(self._sizes))
        for chunk in chunks if region.direction == "forward" else reversed(chunks):
            for node in nodes:
                self._write_in_chunk(node, chunk, region)
            # At once, or the terms of all chunks would be alive together.
            for node in summed:
                self._add_term(node, chunk, region)

    def _write_in_chunk(self, node: Node, chunk: int, region: Region) -> None:
        outcome, size = self._plan.outcomes[node], self._sizes[chunk]

        def load(leaf: Any) -> Any:
            if isinstance(leaf, Scaled):
                return leaf.factor * size
            if not isinstance(leaf, Node):
                return leaf
            if leaf in self._chunks and leaf not in outcome.cuts:
                return self._chunks[leaf][chunk]
            layout = outcome.cuts.get(leaf) or self._plan.entries.get(leaf)
            return self._cut(leaf, layout, region)[chunk] if layout else self._make_whole(leaf)

        args: Any = node.args if outcome.args is None else outcome.args
        args, kwargs = map_aggregate(args, load), map_aggregate(node.kwargs, load)
        new = self._call(node.target, args, kwargs, name=f"{node.name}_chunk{chunk}")
        new.meta = {**node.meta}
        write_annotation(new, _annotation(region, "body", chunk))
        where = f"{node.name} ({node.target}) in {region}"
        try:
            new.meta["val"] = self._evaluated.value(new)
            bind_symbols_anew(new)
        except Exception as error:
            problem = f"does not run on chunk {chunk}: {str(error).strip().splitlines()[0]}"
            raise GraphChunkingError([f"{where} {problem}"]) from error
        expected, found = _shape_in_chunk(node, outcome.state, size), value_of(new)
        if expected is not None and isinstance(found, torch.Tensor) and expected != found.shape:
            problem = f"has the shape {tuple(found.shape)} in chunk {chunk}, and by its rule should"
            raise GraphChunkingError([f"{where} {problem} have {expected}"])
        self._chunks.setdefault(node, [new] * len(self._sizes))[chunk] = new

    # Cuts and joins.

    def _cut(self, node: Node, layout: Layout, region: Region) -> list[Node]:
        """The parts of a whole value."""
        if (node, layout) in self.parts:
            return self.parts[node, layout]
        make = partial(self._make, node, region, "split_boundary")
        whole, dim = self._make_whole(node), layout.dim
        rows = [size * layout.inner for size in self._sizes]
        if layout.outer > 1:
            shape = _reshaped(whole, dim, 1, [layout.outer, sum(rows)])
            whole = make(aten.reshape.default, whole, shape)
        split = make(aten.split_with_sizes.default, whole, rows, dim + (layout.outer > 1))
        parts = self.parts[node, layout] = []
        for chunk, num_rows in enumerate(rows):
            part = make(operator.getitem, split, chunk)
            if layout.outer > 1:
                shape = _reshaped(part, dim, 2, [layout.outer * num_rows])
                part = make(aten.reshape.default, part, shape)
            elif not _is_dense(part):
                # A forward views its inputs, which a part of a larger tensor may not allow.
                part = make(aten.clone.default, part)
            parts.append(part)
        return parts

    def _join(self, node: Node) -> Node:
        state, chunks = self._plan.outcomes[node].state, self._chunks[node]
        if state == Whole():
            return chunks[0]  # all are equal
        assert isinstance(state, Sharded)  # sums exist already; the plan refused the rest
        make = partial(self._make, node, self._region_of[node], "materialization")
        layout, dim = state.layout, state.layout.dim
        if layout.outer == 1:
            joined = make(aten.cat.default, list(chunks), dim)
        else:
            parts = []
            for chunk, size in zip(chunks, self._sizes, strict=True):
                shape = _reshaped(chunk, dim, 1, [layout.outer, size * layout.inner])
                parts.append(make(aten.reshape.default, chunk, shape))
            joined = make(aten.cat.default, parts, dim + 1)
            joined = make(aten.view.default, joined, list(node.meta["val"].shape))
        self.joins[node] = Join(unchunked=node.name, joined=joined.name, kind="cat")
        return joined

    def _add_term(self, node: Node, chunk: int, region: Region) -> None:
        """Add a chunk's term to those before it."""
        term = self._chunks[node][chunk]
        if node not in self._whole:
            self._whole[node] = term
            return
        make = partial(self._make, node, region, "materialization")
        total = self._whole[node] = make(aten.add.Tensor, self._whole[node], term)
        self.joins[node] = Join(unchunked=node.name, joined=total.name, kind="sum")

    # New nodes.

    def _make(
        self, node: Node, region: Region, role: ChunkRole, target: Any, *args: Any, **kwargs: Any
    ) -> Node:
        """Make a node at the edge of a region, for a value of the unchunked graph."""
        kind = "part" if target is operator.getitem else target.overloadpacket.__name__
        new = self._call(target, args, kwargs, name=f"{node.name}_{kind}")
        if "stack_trace" in node.meta:
            new.meta["stack_trace"] = node.meta["stack_trace"]
        if region.direction == "backward":
            new.meta["autograd_backward"] = True
        write_annotation(new, ModuleAnnotation(fqn=region.root))
        write_annotation(new, PhaseAnnotation(phase=region.direction))
        write_annotation(new, _annotation(region, role))
        new.meta["val"] = self._evaluated.value(new)
        return new

    def _call(self, target: Any, args: Any, kwargs: Any, *, name: str) -> Node:
        with self._graph.inserting_before(self._output):
            return self._graph.create_node("call_function", target, args, kwargs, name=name)


def _annotation(region: Region, role: ChunkRole, chunk_id: int | None = None) -> ChunkAnnotation:
    return ChunkAnnotation(
        region_root=region.root,
        role=role,
        chunk_id=chunk_id,
        direction=region.direction,
        producer="graph",
    )


def _reshaped(node: Node, dim: int, num_dims: int, sizes: Sequence[int]) -> list[int]:
    """The shape of a value with some of its dimensions in place of others."""
    shape = list(node.meta["val"].shape)
    return [*shape[:dim], *sizes, *shape[dim + num_dims :]]


def _shape_in_chunk(
    node: Node, state: State | tuple[State, ...], size: int
) -> tuple[int, ...] | None:
    """What a rule's answer says of the shape of a chunk's value; None where it says nothing."""
    value = value_of(node)
    layout = None if isinstance(state, tuple) else layout_of(state)
    knows_shape = layout is not None or isinstance(state, (Whole, Partial))
    if not knows_shape or not isinstance(value, torch.Tensor):
        return None
    shape = list(value.shape)
    if layout is not None:
        shape[layout.dim] = layout.factor * size
    return tuple(shape)


def _is_dense(node: Node) -> bool:
    """Whether a tensor fills its memory without gaps, in any order of its dimensions."""
    value = value_of(node)
    assert isinstance(value, torch.Tensor)
    return torch.empty_like(value).stride() == value.stride()


# Fake values of nodes beside exchanges of tokens, without long sums of sizes while they are
# made.
#
# A rank receives as many rows as its peers send: a sum of one size for each. Operators ask such
# a sum dozens of questions, and SymPy takes milliseconds for each where there are 256 peers.
# What a dispatch gave is one symbol from then on (``ShortenedSizes``), and all that is computed
# of it. What comes back is as much as went out: that is a number, which operators find out by
# comparing the two. Such a sum is short only while an operator runs that does no more than that,
# if it compares at all.
_CASTS = frozenset({torch.ops.aten._to_copy.default})
"""Of one tensor; there is no other with whose rows they could compare its own."""


class ExchangedValues:
    """Evaluates nodes of one graph in their order, until ``restore``."""

    def __init__(self, shape_env: ShapeEnv | None) -> None:
        self._dispatched = ShortenedSizes(shape_env)
        self._returned = ShortenedSizes(shape_env)
        self._written: list[Node] = []
        self._is_off = shape_env is None

    def value(self, node: Node) -> Any:
        """What ``evaluate`` gives, with sums that a dispatch made in short.

        Unless an operator asks or finds what is said of the sum alone: then all are as they are,
        from there on.
        """
        if self._is_off:
            return evaluate(node)
        self._written.append(node)
        returned = _returned_by(node)
        if returned is not None:
            return self._beside(node, *returned)
        found = _evaluated_in_short(node, self._dispatched)
        if found is None:
            self.restore([*self._written, *node.all_input_nodes])
            self._is_off = True
            return evaluate(node)
        (value,) = found
        if is_collective(node) and isinstance(value, torch.Tensor) and value.ndim:
            sent = value_of(node.all_input_nodes[0])
            self._dispatched.shorten(value, is_new=_is_counted(sent))
        return value

    def restore(self, nodes: Iterable[Node]) -> None:
        """Let the values of nodes have the sums again."""
        self._dispatched.restore(map(value_of, nodes))

    def _beside(self, node: Node, returned: torch.Tensor, number: int | None) -> Any:
        """The value of a node, with the rows of one operand in short, which may be a number."""
        self._returned.shorten(returned, is_new=True)
        if number is not None:
            self._returned.tell(returned, number)
        found = _evaluated_in_short(node, self._returned)
        self._returned.restore([returned, *(found or ())])
        return evaluate(node) if found is None else found[0]


def _evaluated_in_short(node: Node, sizes: ShortenedSizes) -> tuple[Any] | None:
    """The value of a node; None if it must be evaluated of whole sums."""
    try:
        value = evaluate(node)
    except Exception:  # noqa: BLE001  # PyTorch knows less of a size that it did not make
        sizes.forget_values()
        return None
    return None if sizes.forget_values() else (value,)


def _returned_by(node: Node) -> tuple[torch.Tensor, int | None] | None:
    """The operand whose rows may be short while a node is evaluated, and what number they are."""
    operands = [value_of(source) for source in node.all_input_nodes]
    tensors = [each for each in operands if isinstance(each, torch.Tensor) and each.ndim]
    if len(tensors) < len(operands) or not tensors:
        return None
    if is_wait(node) or node.target in _CASTS:
        return tensors[0], None
    if node.target is not torch.ops.aten.mul.Tensor or len({each.ndim for each in tensors}) > 1:
        return None
    counted = [each for each in tensors if _is_counted(each)]
    summed = [each for each in tensors if not _is_counted(each)]
    if len(counted) != 1 or len(summed) != 1 or counted[0].shape[0] == 1:
        return None
    number, rows = counted[0].shape[0], cast("Any", summed[0].shape[0])
    if not rows.node.expr.is_Add:
        return None
    torch._check(rows == number)  # as the operator does, of the sum itself
    return summed[0], number


def _is_counted(value: object) -> bool:
    """Whether a value is a tensor of as many rows as a trace knows."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and isinstance(value.shape[0], int)
