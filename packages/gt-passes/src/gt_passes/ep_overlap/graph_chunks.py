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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from gt_config.node_keys import (
    ChunkAnnotation,
    ChunkRole,
    ModuleAnnotation,
    PhaseAnnotation,
)
from gt_passes._torch_internals import FakeTensorMode, OpOverload, quiet_fake_execution, value_of
from gt_passes.ep_overlap.chunk_plan import ChunkPlan, plan_chunks
from gt_passes.ep_overlap.chunk_states import (
    Layout,
    Partial,
    Sharded,
    Whole,
    layout_of,
)
from gt_passes.ep_overlap.chunked_nodes import Region, find_chunked_nodes
from gt_passes.ep_overlap.rule_calls import Cut, Outcome, Scaled, substitute
from gt_passes.errors import GraphChunkingError
from gt_passes.tensor_signature import signature
from gt_trace.node_metadata import write_annotation

__all__ = ["GraphChunks", "Join", "chunk_graph"]

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
    chunk_dim: Literal["batch", "seq"] = "batch",
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
        writer = _Writer(graph_module.graph, plan, sizes)
        writer.run()
    return GraphChunks(
        regions=tuple(
            (unit.root, unit.direction) for unit in plan.order if isinstance(unit, Region)
        ),
        chunk_sizes=sizes,
        joins=tuple(writer.joins),
        num_splits=writer.num_splits,
    )


class _Writer:
    """Writes the graph anew, in its place: what runs once keeps its node."""

    def __init__(self, graph: Graph, plan: ChunkPlan, sizes: tuple[int, ...]) -> None:
        self._plan = plan
        self._sizes = sizes
        self._region_of = {node: r for r, nodes in plan.regions.items() for node in nodes}
        self._line = _Line(graph)
        self.joins: list[Join] = []
        self.num_splits = 0
        self._whole: dict[Node, Node] = {}
        self._restrided: set[Node] = set()
        self._chunks: dict[Node, list[Node]] = {}
        self._parts: dict[tuple[Node, Layout], list[Node]] = {}

    def run(self) -> None:
        """Write all of it."""
        for unit in self._plan.order:
            if isinstance(unit, Region):
                self._write_region(unit)
            else:
                self._write_outside(unit)
        self._line.erase_rest()

    # What runs once.

    def _write_outside(self, node: Node) -> None:
        changed = {
            source: whole
            for source in node.all_input_nodes
            if (whole := self._make_whole(source)) is not source
        }
        if changed:
            node.args = substitute(node.args, changed)
            node.kwargs = substitute(node.kwargs, changed)
        self._line.place(node)
        self._whole[node] = node
        if node.op == "output":
            return
        # Joined values may have other strides, and so has then what is made of them.
        self._restrided.update(
            whole for old, whole in changed.items() if _differ(value_of(old), value_of(whole))
        )
        if any(source in self._restrided for source in node.all_input_nodes):
            before = value_of(node)
            node.meta["val"] = _evaluate(node)
            if _differ(before, value_of(node)):
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
        args, kwargs = self._arguments(node, chunk, region)
        new = self._line.call(node.target, args, kwargs, name=f"{node.name}_chunk{chunk}")
        new.meta = {**node.meta}
        write_annotation(new, _annotation(region, "body", chunk))
        try:
            new.meta["val"] = _evaluate(new)
        except Exception as error:
            problem = f"does not run on chunk {chunk}: {str(error).strip().splitlines()[0]}"
            raise GraphChunkingError([f"{_where(node, region)} {problem}"]) from error
        self._check_shape(node, new, chunk, region)
        self._chunks.setdefault(node, [new] * len(self._sizes))[chunk] = new

    def _arguments(self, node: Node, chunk: int, region: Region) -> tuple[Any, Any]:
        """The arguments of a node in one chunk."""
        outcome = self._plan.outcomes[node]

        def load(leaf: Any) -> Any:
            if isinstance(leaf, Node):
                return self._read(leaf, chunk, region)
            if isinstance(leaf, Scaled):
                return leaf.factor * self._sizes[chunk]
            if isinstance(leaf, Cut):
                return self._cut(leaf.node, leaf.layout, region)[chunk]
            return leaf

        args, kwargs = _replaced_arguments(node, outcome)
        return map_aggregate(args, load), map_aggregate(kwargs, load)

    def _read(self, node: Node, chunk: int, region: Region) -> Node:
        """A chunk's value of a node, or the whole one where there is no other."""
        if node in self._chunks:
            return self._chunks[node][chunk]
        entry = self._plan.entry_states.get(node)
        if entry is not None:
            return self._cut(node, entry.layout, region)[chunk]
        return self._make_whole(node)

    def _check_shape(self, node: Node, new: Node, chunk: int, region: Region) -> None:
        """A rule's answer must hold for the shape of every chunk."""
        state = self._plan.outcomes[node].state
        layout = None if isinstance(state, tuple) else layout_of(state)
        before, after = value_of(node), value_of(new)
        if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
            return
        expected: list[Any] = list(before.shape)
        if layout is not None:
            expected[layout.dim] = layout.factor * self._sizes[chunk]
        elif not isinstance(state, (Whole, Partial)):
            return
        if list(after.shape) != expected:
            problem = f"has the shape {tuple(after.shape)} in chunk {chunk}, and by its rule should"
            raise GraphChunkingError([f"{_where(node, region)} {problem} have {tuple(expected)}"])

    # Cuts.

    def _cut(self, node: Node, layout: Layout, region: Region) -> list[Node]:
        """The parts of a whole value."""
        if (node, layout) not in self._parts:
            self.num_splits += 1
            make = _Boundary(self._line, region, "split_boundary", node)
            whole, dim = self._make_whole(node), layout.dim
            before, after = _around(whole, dim)
            if layout.outer > 1:
                if not _is_dense(whole):
                    whole = make(aten.clone.default, whole, memory_format=torch.contiguous_format)
                rows = sum(self._sizes) * layout.inner
                whole = make(aten.view.default, whole, [*before, layout.outer, rows, *after])
                dim += 1
            rows_of = [size * layout.inner for size in self._sizes]
            split = make(aten.split_with_sizes.default, whole, rows_of, dim)
            parts = []
            for chunk, rows in enumerate(rows_of):
                part = make(operator.getitem, split, chunk)
                # A forward views its inputs, which a part of a larger tensor may not allow.
                if not _is_dense(part):
                    part = make(aten.clone.default, part)
                if layout.outer > 1:
                    part = make(aten.view.default, part, [*before, layout.outer * rows, *after])
                parts.append(part)
            self._parts[node, layout] = parts
        return self._parts[node, layout]

    # Joins.

    def _join(self, node: Node) -> Node:
        region, state = self._region_of[node], self._plan.outcomes[node].state
        chunks = self._chunks[node]
        if state == Whole():
            return chunks[0]  # all are equal
        assert isinstance(state, Sharded)  # sums exist already; the plan refused the rest
        make = _Boundary(self._line, region, "materialization", node)
        layout, dim = state.layout, state.layout.dim
        if layout.outer > 1:
            parts = []
            for chunk, size in zip(chunks, self._sizes, strict=True):
                before, after = _around(chunk, dim)
                shape = [*before, layout.outer, size * layout.inner, *after]
                parts.append(make(aten.reshape.default, chunk, shape))
            joined = make(aten.cat.default, parts, dim + 1)
            joined = make(aten.view.default, joined, list(_shape(node)))
        else:
            joined = make(aten.cat.default, list(chunks), dim)
        self.joins.append(Join(unchunked=node.name, joined=joined.name, kind="cat"))
        return joined

    def _add_term(self, node: Node, chunk: int, region: Region) -> None:
        """Add a chunk's term to those before it."""
        term = self._chunks[node][chunk]
        if node not in self._whole:
            self._whole[node] = term
            return
        make = _Boundary(self._line, region, "materialization", node)
        total = make(aten.add.Tensor, self._whole[node], term)
        self._whole[node] = total
        self.joins = [join for join in self.joins if join.unchunked != node.name]
        self.joins.append(Join(unchunked=node.name, joined=total.name, kind="sum"))


class _Line:
    """The nodes of a graph in the order in which they are placed, and behind them the old ones."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._last: Node | None = None

    def place(self, node: Node) -> None:
        """Put a node next."""
        if self._last is None:
            next(iter(self._graph.nodes)).prepend(node)
        else:
            self._last.append(node)
        self._last = node

    def call(self, target: Any, args: Any, kwargs: Any, *, name: str) -> Node:
        """Make a node and put it next."""
        node = self._graph.create_node("call_function", target, args, kwargs, name=name)
        self.place(node)
        return node

    def erase_rest(self) -> None:
        """Erase what was not placed; nothing that was uses it."""
        for node in reversed(list(self._graph.nodes)):
            if node is self._last:
                break
            self._graph.erase_node(node)


class _Boundary:
    """Makes nodes at the edge of a region."""

    def __init__(self, line: _Line, region: Region, role: ChunkRole, node: Node) -> None:
        self._line = line
        self._name = node.name
        self._meta: dict[str, Any] = {
            key: node.meta[key] for key in ("stack_trace",) if key in node.meta
        }
        if region.direction == "backward":
            self._meta["autograd_backward"] = True
        self._annotations = (
            ModuleAnnotation(fqn=region.root),
            PhaseAnnotation(phase=region.direction),
            _annotation(region, role),
        )

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        kind = "part" if target is operator.getitem else target.overloadpacket.__name__
        new = self._line.call(target, args, kwargs, name=f"{self._name}_{kind}")
        new.meta = {**self._meta}
        for annotation in self._annotations:
            write_annotation(new, annotation)
        new.meta["val"] = _evaluate(new)
        return new


def _annotation(region: Region, role: ChunkRole, chunk_id: int | None = None) -> ChunkAnnotation:
    return ChunkAnnotation(
        region_root=region.root,
        role=role,
        chunk_id=chunk_id,
        direction=region.direction,
        producer="graph",
    )


def _replaced_arguments(node: Node, outcome: Outcome) -> tuple[Any, Any]:
    """The arguments of a node with those that its rule changes."""
    args, kwargs = list(node.args), dict(node.kwargs)
    if not outcome.changed:
        return tuple(args), kwargs
    assert isinstance(node.target, OpOverload)  # others have no rules that change arguments
    for position, declared in enumerate(node.target._schema.arguments):
        if declared.name not in outcome.changed:
            continue
        if position < len(args) and not declared.kwarg_only:
            args[position] = outcome.changed[declared.name]
        else:
            kwargs[declared.name] = outcome.changed[declared.name]
    return tuple(args), kwargs


def _evaluate(node: Node) -> object:
    """What the operator of a node gives on the fake values of its inputs."""

    def load(leaf: Any) -> Any:
        return value_of(leaf) if isinstance(leaf, Node) else leaf

    args: Any = map_aggregate(node.args, load)
    kwargs: Any = map_aggregate(node.kwargs, load)
    assert callable(node.target)  # true of call_function nodes
    return node.target(*args, **kwargs)


def _where(node: Node, region: Region) -> str:
    return f"{node.name} ({node.target}) in {region}"


def _differ(old: object, now: object) -> bool:
    return old is not now and signature(old) != signature(now)


def _shape(node: Node) -> tuple[int, ...]:
    value = value_of(node)
    assert isinstance(value, torch.Tensor)
    return tuple(value.shape)


def _around(node: Node, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = _shape(node)
    return shape[:dim], shape[dim + 1 :]


def _is_dense(node: Node) -> bool:
    """Whether a tensor fills its memory without gaps, in any order of its dimensions."""
    value = value_of(node)
    assert isinstance(value, torch.Tensor)
    strides = sorted((s, n) for s, n in zip(value.stride(), value.shape, strict=True) if n != 1)
    expected = 1
    for stride, size in strides:
        if stride != expected:
            return False
        expected *= size
    return True
