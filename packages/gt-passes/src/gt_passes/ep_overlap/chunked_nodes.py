"""Which nodes of a captured step run once for each chunk.

A region is what one chunked module does in one direction. Its nodes are found by the names of
modules that they carry, with two additions: sums of gradients, which nobody could name, belong to
the region whose values they add or between whose nodes they stand; and what writes to the memory of
a chunk, or whose memory a chunk writes to, belongs to it. What depends on no chunk runs once,
outside: gathered parameters, their casts and views, constants.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from gt_config import EpChunkDim
from gt_config.node_keys import Direction, FsdpCollectiveAnnotation, ModuleAnnotation
from gt_passes._torch_internals import value_of
from gt_passes.analysis.aliasing import AliasClasses, written_nodes
from gt_passes.analysis.layer_names import LayerNames
from gt_passes.ep_overlap.chunk_states import Layout
from gt_passes.errors import GraphChunkingError
from gt_trace.node_metadata import phase_of, read_annotation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region:
    """One chunked module in one direction. Compared by identity."""

    root: str
    """Fully qualified name of the module."""

    direction: Direction

    def __str__(self) -> str:
        return f"the {self.direction} of {self.root}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedNodes:
    """What runs in chunks, and what enters chunked."""

    region_of: dict[Node, Region]
    """The region of each node that runs once for each chunk, in execution order."""

    entries: dict[Node, Layout]
    """The layout of each node that runs once and of which each chunk reads its part."""

    extent: int
    """The size of the dimension that is chunked."""

    aliases: AliasClasses


def find_chunked_nodes(
    graph_module: GraphModule,
    *,
    patterns: Sequence[str],
    chunk_dim: EpChunkDim,
    num_static_inputs: int,
) -> ChunkedNodes:
    """Find what runs in chunks.

    Args:
        graph_module: a captured step, with modules and phases annotated.
        patterns: of the names of modules to chunk, as ``layers.*.moe``.
        chunk_dim: batch is dim 0 of the (batch, sequence, model) inputs of the modules, seq dim 1.
        num_static_inputs: number of leading placeholders that hold parameters and buffers.

    Raises:
        GraphChunkingError: there is nothing to chunk, or what enters the modules is not understood.
    """
    nodes = list(graph_module.graph.nodes)
    dependent = _depending_on_data(nodes, num_static_inputs)
    candidates = _named_nodes(nodes, patterns)
    if not candidates:
        names = ", ".join(patterns)
        raise GraphChunkingError([f"no node belongs to a module that {names} matches"])
    candidates = _with_sums(nodes, candidates, dependent)
    entering: dict[Node, Node] = {}
    for node in candidates:
        for source in node.all_input_nodes:
            if source in dependent and source not in candidates:
                entering.setdefault(source, node)
    shapes, extent = _token_shapes(entering, candidates, chunk_dim)
    layouts = _entry_layouts(entering, shapes=shapes, extent=extent, chunk_dim=chunk_dim)
    aliases = AliasClasses(graph_module.graph)
    chunked = _depending_on_chunks(candidates, layouts, aliases)
    return ChunkedNodes(
        region_of={node: candidates[node] for node in nodes if node in chunked},
        entries=layouts,
        extent=extent,
        aliases=aliases,
    )


def has_nodes_of(graph_module: GraphModule, patterns: Sequence[str]) -> bool:
    """Whether any node belongs to a module that a pattern matches."""
    return bool(_named_nodes(list(graph_module.graph.nodes), patterns))


def _depending_on_data(nodes: Sequence[Node], num_static_inputs: int) -> set[Node]:
    inputs = [node for node in nodes if node.op == "placeholder"]
    dependent = set(inputs[num_static_inputs:])
    for node in nodes:
        if any(source in dependent for source in node.all_input_nodes):
            dependent.add(node)
    return dependent


def _named_nodes(nodes: Sequence[Node], patterns: Sequence[str]) -> dict[Node, Region]:
    """The nodes that carry the name of a chunked module."""
    layers = [LayerNames(pattern) for pattern in patterns]
    regions: dict[tuple[str, str], Region] = {}
    found: dict[Node, Region] = {}
    # The reduction of a gradient is done once, the sum of its parts too, and what follows them.
    reduced: set[Node] = set()
    for node in nodes:
        if node.op != "call_function":
            continue
        collective = read_annotation(node, FsdpCollectiveAnnotation)
        reduces = collective is not None and collective.kind != "unshard"
        if reduces or any(source in reduced for source in node.all_input_nodes):
            reduced.add(node)
            continue
        if node.target is operator.getitem and node.all_input_nodes[0] in found:
            found[node] = found[node.all_input_nodes[0]]
            continue
        direction = phase_of(node)
        root = next(filter(None, (names.layer_of(node) for names in layers)), None)
        if direction in ("forward", "backward") and root is not None and collective is None:
            region = Region(root=root, direction=direction)
            found[node] = regions.setdefault((root, direction), region)
    return found


def _with_sums(
    nodes: Sequence[Node], named: Mapping[Node, Region], dependent: Collection[Node]
) -> dict[Node, Region]:
    """Add the sums of gradients that lie between two nodes of a region, or that follow it.

    They carry no module. Those that add the values of several regions follow the latest.
    """
    found = dict(named)
    regions = list(dict.fromkeys(found.values()))
    bit = {region: 1 << index for index, region in enumerate(regions)}

    def reached(
        order: Iterable[Node], neighbours: Callable[[Node], Iterable[Node]]
    ) -> dict[Node, int]:
        """The regions that lie behind each node, a bit for each."""
        behind: dict[Node, int] = {}
        for node in order:
            behind[node] = bit[named[node]] if node in named else 0
            for neighbour in neighbours(node):
                behind[node] |= behind[neighbour]
        return behind

    above = reached(nodes, lambda node: node.all_input_nodes)
    below = reached(reversed(nodes), lambda node: node.users)
    nameless = [
        node
        for node in nodes
        if node.op == "call_function"
        and node not in named
        and node in dependent
        and phase_of(node) == "backward"
        and read_annotation(node, FsdpCollectiveAnnotation) is None
        and (node.meta.get("is_gradient_acc") or read_annotation(node, ModuleAnnotation) is None)
    ]
    for node in nameless:
        between = above[node] & below[node]
        if between:
            found[node] = regions[between.bit_length() - 1]
    for node in nameless:
        sources = [source for source in node.all_input_nodes if source in dependent]
        backward = [s for s in sources if s in found and found[s].direction == "backward"]
        if node not in found and sources and backward == sources:
            found[node] = found[sources[-1]]
    return {node: found[node] for node in nodes if node in found}


def _token_shapes(
    entering: Mapping[Node, Node], region_of: Mapping[Node, Region], chunk_dim: EpChunkDim
) -> tuple[set[tuple[int, int]], int]:
    """Batch and sequence of what enters the modules, and the extent of the chunked one.

    The extent is the smallest of a forward. Where ranks share samples or sequences, one input may
    be whole and another this rank's part, and a gradient may be whole where no input is.
    """
    dim = 0 if chunk_dim == "batch" else 1
    forward: dict[tuple[int, int], Node] = {}
    backward: set[tuple[int, int]] = set()
    for source, reader in entering.items():
        value = value_of(source)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.ndim != 3:
            continue
        shape = (value.shape[0], value.shape[1])
        if shape == (1, 1):  # the same for all tokens
            continue
        if region_of[reader].direction == "forward":
            forward.setdefault(shape, source)
        else:
            backward.add(shape)
    extent = min((shape[dim] for shape in forward), default=0)
    if not extent or any(shape[dim] % extent for shape in forward):
        found = ", ".join(f"{node.name} {shape}" for shape, node in forward.items())
        problem = (
            "the modules need inputs (batch, sequence, model) in which each "
            f"{chunk_dim} is the smallest or several times that; found "
        )
        raise GraphChunkingError([problem + (found or "none")])
    return {*forward, *(shape for shape in backward if shape[dim] % extent == 0)}, extent


def _entry_layouts(
    entering: Mapping[Node, Node],
    *,
    shapes: Collection[tuple[int, int]],
    extent: int,
    chunk_dim: EpChunkDim,
) -> dict[Node, Layout]:
    """Where the extent stands in what enters, unless that is the same for all chunks.

    What was gathered of several ranks walks the extent once for each.
    """
    known = _layouts_by_leading_dims(shapes, extent, chunk_dim)
    num_tokens_dims = 1 if chunk_dim == "batch" else 2
    tokens = " or ".join(f"batch {batch} and sequence {seq}" for batch, seq in sorted(shapes))
    layouts: dict[Node, Layout] = {}
    problems = []
    for node, reader in entering.items():
        value = value_of(node)
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        fitting = [layout for leading, layout in known.items() if shape[: len(leading)] == leading]
        if fitting:
            layouts[node] = fitting[0]
        elif shape and any(size != 1 for size in shape[:num_tokens_dims]):
            problems.append(
                f"{node.name} of shape {shape} enters at {reader.name}, depends on the step's "
                f"inputs, and has neither {tokens} in front nor the same value for all chunks"
            )
    if problems:
        raise GraphChunkingError(problems)
    return layouts


def _layouts_by_leading_dims(
    shapes: Collection[tuple[int, int]], extent: int, chunk_dim: EpChunkDim
) -> dict[tuple[int, ...], Layout]:
    """By what a shape begins with; beginnings that may mean two things are left out."""
    found: dict[tuple[int, ...], set[Layout]] = defaultdict(set)
    for batch, sequence in shapes:
        if chunk_dim == "batch":
            outer = batch // extent
            found[batch, sequence].add(Layout(dim=0, outer=outer))
            found[batch,].add(Layout(dim=0, outer=outer))
            found[batch * sequence,].add(Layout(dim=0, outer=outer, inner=sequence))
        else:
            outer = sequence // extent
            found[batch, sequence].add(Layout(dim=1, outer=outer))
            found[batch * sequence,].add(Layout(dim=0, outer=batch * outer))
    return {leading: next(iter(each)) for leading, each in found.items() if len(each) == 1}


def _depending_on_chunks(
    region_of: Mapping[Node, Region], entries: Mapping[Node, Layout], aliases: AliasClasses
) -> set[Node]:
    """What reads chunks, and what shares memory that chunks write to."""
    chunked: set[Node] = set()
    written: set[Node] = set()
    num_before = -1
    while len(chunked) > num_before:
        num_before = len(chunked)
        for node in region_of:
            reads = any(source in chunked or source in entries for source in node.all_input_nodes)
            if reads or aliases.class_of(node) in written:
                chunked.add(node)
                targets = (t for t in written_nodes(node) if not aliases.holds_input(t))
                written.update(map(aliases.class_of, targets))
    return chunked
