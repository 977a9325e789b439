"""Which nodes of a captured step run once for each chunk.

A region is what one chunked module does in one direction. Its nodes are found by the names of
modules that they carry, with two additions: sums of gradients, which nobody could name, belong to
the region whose values they add or between whose nodes they stand; and what writes to the memory of
a chunk, or whose memory a chunk writes to, belongs to it. What depends on no chunk runs once,
outside: gathered parameters, their casts and views, constants.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.fx import GraphModule, Node

from gt_config.node_keys import ChunkDirection, FsdpCollectiveAnnotation, ModuleAnnotation
from gt_passes._torch_internals import value_of
from gt_passes.aliasing import AliasClasses, written_nodes
from gt_passes.ep_overlap.chunk_states import Layout
from gt_passes.errors import GraphChunkingError
from gt_passes.layer_names import LayerNames
from gt_trace.node_metadata import phase_of, read_annotation

__all__ = ["ChunkedNodes", "Region", "find_chunked_nodes"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region:
    """One chunked module in one direction. Compared by identity."""

    root: str
    """Fully qualified name of the module."""

    direction: ChunkDirection

    def __str__(self) -> str:
        return f"the {self.direction} of {self.root}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedNodes:
    """What runs in chunks, and what enters chunked."""

    region_of: dict[Node, Region]
    """By node that runs once for each chunk, in execution order."""

    entries: dict[Node, Layout]
    """By node that runs once and of which each chunk reads its part."""

    extent: int
    """Of the dimension that is chunked."""

    aliases: AliasClasses


def find_chunked_nodes(
    graph_module: GraphModule,
    *,
    patterns: Sequence[str],
    chunk_dim: Literal["batch", "seq"],
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
    return _Finder(graph_module, patterns, chunk_dim, num_static_inputs).find()


@dataclass(slots=True)
class _Tokens:
    """The extents of the modules' inputs, and how they stand in the shapes of what enters."""

    batch: int
    sequence: int
    chunk_dim: Literal["batch", "seq"]
    problems: list[str] = field(default_factory=list)

    def layout_of(self, node: Node, reader: Node) -> Layout | None:
        """Of a value that depends on data and enters a region; None if it is the same for all."""
        value = value_of(node)
        if not isinstance(value, torch.Tensor):
            return None
        shape = tuple(value.shape)
        dim = 0 if self.chunk_dim == "batch" else 1
        if len(shape) > 1 and shape[:2] == (self.batch, self.sequence):
            return Layout(dim=dim)
        if shape and shape[0] == self.batch * self.sequence:
            if dim == 0:
                return Layout(dim=0, inner=self.sequence)
            return Layout(dim=0, outer=self.batch)
        if dim == 0 and shape and shape[0] == self.batch:
            return Layout(dim=0)
        if not shape or (shape[0] == 1 and (dim == 0 or len(shape) < 2 or shape[1] == 1)):
            return None
        self.problems.append(
            f"{node.name} of shape {shape} enters at {reader.name}, depends on the step's inputs, "
            f"and has neither batch {self.batch} and sequence {self.sequence} in front nor the "
            "same value for all chunks"
        )
        return None


class _Finder:
    def __init__(
        self,
        graph_module: GraphModule,
        patterns: Sequence[str],
        chunk_dim: Literal["batch", "seq"],
        num_static_inputs: int,
    ) -> None:
        self._nodes = list(graph_module.graph.nodes)
        self._patterns = tuple(patterns)
        self._names = [LayerNames(pattern) for pattern in patterns]
        self._chunk_dim = chunk_dim
        self._aliases = AliasClasses(graph_module.graph)
        self._regions: dict[tuple[str, str], Region] = {}
        self._candidates: dict[Node, Region] = {}
        self._dependent = self._depending_on_data(num_static_inputs)

    def find(self) -> ChunkedNodes:
        self._find_candidates()
        if not self._candidates:
            names = ", ".join(self._patterns)
            raise GraphChunkingError([f"no node belongs to a module that {names} matches"])
        self._absorb_between()
        self._absorb_after()
        found = self._candidates
        self._candidates = {node: found[node] for node in self._nodes if node in found}
        tokens = self._tokens()
        entries: dict[Node, Layout] = {}
        chunked: set[Node] = set()
        while self._spread(chunked, entries, tokens):
            pass
        if tokens.problems:
            raise GraphChunkingError(tokens.problems)
        return ChunkedNodes(
            region_of={n: self._candidates[n] for n in self._nodes if n in chunked},
            entries=entries,
            extent=tokens.batch if self._chunk_dim == "batch" else tokens.sequence,
            aliases=self._aliases,
        )

    def _depending_on_data(self, num_static_inputs: int) -> set[Node]:
        dependent: set[Node] = set()
        num_inputs = 0
        for node in self._nodes:
            if node.op == "placeholder":
                num_inputs += 1
                if num_inputs > num_static_inputs:
                    dependent.add(node)
            elif any(source in dependent for source in node.all_input_nodes):
                dependent.add(node)
        return dependent

    def _find_candidates(self) -> None:
        reduced: set[Node] = set()  # what follows the reduction of a gradient is done once
        for node in self._nodes:
            if node.op != "call_function":
                continue
            collective = read_annotation(node, FsdpCollectiveAnnotation)
            if (collective is not None and collective.kind == "reduce_grad") or any(
                source in reduced for source in node.all_input_nodes
            ):
                reduced.add(node)
                continue
            if node.target is operator.getitem and node.args[0] in self._candidates:
                source = node.args[0]
                assert isinstance(source, Node)  # a key of candidates
                self._candidates[node] = self._candidates[source]
                continue
            direction = phase_of(node)
            if direction not in ("forward", "backward"):
                continue
            found = (names.layer_of(node) for names in self._names)
            root = next((name for name in found if name is not None), None)
            if root is None or collective is not None:
                continue
            region = Region(root=root, direction=direction)
            self._candidates[node] = self._regions.setdefault((root, direction), region)

    def _nameless(self) -> Iterator[Node]:
        """Nodes of the backward that carry no module: sums of gradients."""
        for node in self._nodes:
            if node.op != "call_function" or node in self._candidates:
                continue
            if phase_of(node) != "backward" or node not in self._dependent:
                continue
            if read_annotation(node, FsdpCollectiveAnnotation) is not None:
                continue
            if node.meta.get("is_gradient_acc") or read_annotation(node, ModuleAnnotation) is None:
                yield node

    def _absorb_between(self) -> None:
        """Take nameless nodes that lie between two nodes of one region into it."""
        regions = list(self._regions.values())
        bit = {region: 1 << index for index, region in enumerate(regions)}
        nothing = 0

        def own(node: Node) -> int:
            return bit[self._candidates[node]] if node in self._candidates else nothing

        above: dict[Node, int] = {}
        for node in self._nodes:
            above[node] = own(node)
            for source in node.all_input_nodes:
                above[node] |= above[source]
        below: dict[Node, int] = {}
        for node in reversed(self._nodes):
            below[node] = own(node)
            for user in node.users:
                below[node] |= below[user]
        for node in self._nameless():
            common = above[node] & below[node]
            if common:
                self._candidates[node] = regions[common.bit_length() - 1]

    def _absorb_after(self) -> None:
        """Take nameless nodes all of whose data come from regions into the latest of these."""
        for node in list(self._nameless()):
            sources = [source for source in node.all_input_nodes if source in self._dependent]
            if sources and all(
                source in self._candidates and self._candidates[source].direction == "backward"
                for source in sources
            ):
                self._candidates[node] = self._candidates[sources[-1]]

    def _tokens(self) -> _Tokens:
        shapes: dict[tuple[int, int], Node] = {}
        for node, region in self._candidates.items():
            if region.direction != "forward":
                continue
            for source in node.all_input_nodes:
                value = value_of(source)
                if (
                    source not in self._candidates
                    and source in self._dependent
                    and isinstance(value, torch.Tensor)
                    and value.is_floating_point()
                    and value.ndim == 3
                ):
                    shapes.setdefault((value.shape[0], value.shape[1]), source)
        if len(shapes) != 1:
            found = ", ".join(f"{node.name} {shape}" for shape, node in shapes.items())
            problem = "the modules need inputs (batch, sequence, model) of one shape; found "
            raise GraphChunkingError([problem + (found or "none")])
        ((batch, sequence),) = shapes
        return _Tokens(batch=batch, sequence=sequence, chunk_dim=self._chunk_dim)

    def _spread(self, chunked: set[Node], entries: dict[Node, Layout], tokens: _Tokens) -> bool:
        """Add what depends on chunks, and what chunks write to; whether anything was added."""
        num_before = len(chunked)
        for node in self._candidates:
            for source in node.all_input_nodes:
                if source in chunked or source in entries:
                    chunked.add(node)
                elif source not in self._candidates and source in self._dependent:
                    layout = tokens.layout_of(source, node)
                    if layout is not None:
                        entries[source] = layout
                        chunked.add(node)
        written = {
            self._aliases.class_of(target)
            for node in self._candidates
            if node in chunked
            for target in written_nodes(node)
            if not self._aliases.holds_input(target)
        }
        chunked.update(n for n in self._candidates if self._aliases.class_of(n) in written)
        return len(chunked) > num_before and bool(written)
