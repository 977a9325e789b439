"""The chunks of a graph, read from its metadata: collected, settled and checked.

``ChunkAnnotation`` (gt_config.node_keys) is all that producers of chunks and those who schedule
them share. ``ChunkRegions.of`` reads a graph into regions, one for each chunked module and
direction, and refuses a graph whose metadata contradict themselves.
``settle_chunk_annotations`` finishes what a producer that works before the trace cannot know.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import GraphModule, Node

from gt_config.compile_config import ChunkProducer
from gt_config.node_keys import (
    ChunkAnnotation,
    ChunkRole,
    Direction,
    EpExchangeAnnotation,
)
from gt_passes._torch_internals import OpOverload
from gt_passes.analysis.collectives import is_collective, is_declared_launch, raw_results, waits_of
from gt_passes.analysis.fsdp_collective import fsdp_collective
from gt_passes.errors import ChunkMetadataError
from gt_trace.node_metadata import phase_of, read_annotation, remove_annotation, write_annotation

# ---- settling ----------------------------------------------------------------------------------

_MIRRORED: dict[ChunkRole, ChunkRole] = {
    "split_boundary": "materialization",
    "body": "body",
    "materialization": "split_boundary",
}
"""What the backward of a node of each role does."""


def settle_chunk_annotations(graph_module: GraphModule, *, roots: Sequence[str] = ()) -> None:
    """Make the annotations that an eager producer left in a trace those of the contract, in place.

    Autograd's nodes inherit the annotation of the forward node that caused them: here they get the
    direction backward, and boundaries change their roles. Sums of gradients, which nobody could
    annotate, join the chunk whose values alone they add, or else are materializations. What does
    not depend on a chunk loses its annotation: gathered parameters and what is computed of them
    alone, and the backward of those once gradients of all chunks are summed.

    A graph without chunks, and one that is settled already, stay as they are.

    Args:
        graph_module: as traced.
        roots: modules that were to run in chunks, as ``ChunkedForwards`` has them.

    Raises:
        ChunkMetadataError: a root left no node in the graph: its forward was not called.
    """
    seen = {
        annotation.region_root
        for node in graph_module.graph.nodes
        if (annotation := read_annotation(node, ChunkAnnotation)) is not None
    }
    missing = [
        f"{root}: it was to run in chunks, and left no node in the graph; was its forward called?"
        for root in roots
        if root not in seen
    ]
    if missing:
        raise ChunkMetadataError(missing)
    if not seen:
        return
    summed: dict[Node, str] = {}
    """Gradients of all chunks of a region together, and what follows from them alone."""

    for node in graph_module.graph.nodes:
        annotation = read_annotation(node, ChunkAnnotation)
        if fsdp_collective(node) is not None:
            remove_annotation(node, ChunkAnnotation)
            continue
        if annotation is None:
            _settle_sum(node, summed)
            continue
        if phase_of(node) == "backward" and annotation.direction == "forward":
            annotation = replace(annotation, direction="backward", role=_MIRRORED[annotation.role])
            write_annotation(node, annotation)
        if annotation.role != "body":
            if annotation.role == "materialization" and annotation.direction == "backward":
                summed[node] = annotation.region_root
            continue
        if annotation.direction == "backward" and _follows_sum(node, annotation, summed):
            summed[node] = annotation.region_root
            remove_annotation(node, ChunkAnnotation)
        elif not _depends_on_chunks(node, annotation):
            remove_annotation(node, ChunkAnnotation)


def _settle_sum(node: Node, summed: dict[Node, str]) -> None:
    """Annotate a sum of gradients that autograd made between nodes of one region."""
    if not node.meta.get("is_gradient_acc", False):
        return
    found = [read_annotation(each, ChunkAnnotation) for each in node.all_input_nodes]
    known = [each for each in found if each is not None and each.direction == "backward"]
    if len(known) != len(found) or len({each.region_root for each in known}) != 1:
        return
    # A cut gradient that goes straight to an input (a residual) is of the chunk that it joins.
    chunk_ids = {each.chunk_id for each in known if each.role != "split_boundary"}
    if not chunk_ids:
        return
    if len(chunk_ids) == 1 and chunk_ids != {None}:
        (chunk_id,) = chunk_ids
        write_annotation(node, replace(known[0], role="body", chunk_id=chunk_id))
        return
    write_annotation(node, replace(known[0], role="materialization", chunk_id=None))
    summed[node] = known[0].region_root


def _follows_sum(node: Node, annotation: ChunkAnnotation, summed: dict[Node, str]) -> bool:
    return any(summed.get(each) == annotation.region_root for each in node.all_input_nodes)


def _depends_on_chunks(node: Node, annotation: ChunkAnnotation) -> bool:
    for each in node.all_input_nodes:
        found = read_annotation(each, ChunkAnnotation)
        if found is not None and found.region_root == annotation.region_root:
            return True
    return False


# ---- reading -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRegion:
    """One chunked module in one direction. Nodes stand in the order of the graph."""

    root: str
    """Fully qualified name of the module."""

    direction: Direction
    producer: ChunkProducer
    splits: tuple[Node, ...]
    """What makes chunks of whole values."""

    chunks: tuple[tuple[Node, ...], ...]
    """The nodes of each chunk, by chunk id."""

    materializations: tuple[Node, ...]
    """What makes whole values of the chunks' results."""

    @property
    def num_chunks(self) -> int:
        """How many chunks there are."""
        return len(self.chunks)

    def launches(self, chunk_id: int) -> tuple[Node, ...]:
        """The collectives, and exchanges of others, that a chunk launches."""
        return tuple(filter(_is_launch, self.chunks[chunk_id]))

    def __str__(self) -> str:
        return f"{self.root} {self.direction}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRegions:
    """All regions of a graph, in the order in which they begin."""

    regions: tuple[ChunkRegion, ...]

    @classmethod
    def of(cls, graph_module: GraphModule) -> ChunkRegions:
        """Read the regions of a graph; without chunk metadata there are none.

        Raises:
            ChunkMetadataError: The metadata contradict themselves. Listed are, with region and
                node: chunk ids with gaps, or that differ between the directions of a module; a
                direction that is not the node's phase; FSDP nodes in a region; a chunk that reads
                what belongs to another; a collective that is not waited for once, in its own
                chunk; chunks that do not launch the same collectives.
        """
        found: dict[tuple[str, Direction], _Collected] = defaultdict(_Collected)
        problems: list[str] = []
        for node in graph_module.graph.nodes:
            annotation = read_annotation(node, ChunkAnnotation)
            if annotation is None:
                continue
            found[annotation.region_root, annotation.direction].add(node, annotation)
            problems.extend(_node_problems(node, annotation))
        for (root, direction), collected in found.items():
            problems.extend(collected.problems(f"{root} {direction}"))
        problems.extend(_direction_problems(found))
        if problems:
            raise ChunkMetadataError(problems)
        regions = cls(
            regions=tuple(each.region(*key) for key, each in found.items()),
        )
        problems = [problem for each in regions.regions for problem in _region_problems(each)]
        if problems:
            raise ChunkMetadataError(problems)
        return regions

    def find(self, root: str, direction: Direction) -> ChunkRegion | None:
        """The region of a module in one direction, or None."""
        for region in self.regions:
            if (region.root, region.direction) == (root, direction):
                return region
        return None


@dataclass(slots=True)
class _Collected:
    """Nodes of one region while the graph is read."""

    splits: list[Node] = field(default_factory=list)
    chunks: dict[int, list[Node]] = field(default_factory=lambda: defaultdict(list))
    materializations: list[Node] = field(default_factory=list)
    producers: dict[ChunkProducer, Node] = field(default_factory=dict)

    def add(self, node: Node, annotation: ChunkAnnotation) -> None:
        self.producers.setdefault(annotation.producer, node)
        if annotation.role == "body":
            assert annotation.chunk_id is not None
            self.chunks[annotation.chunk_id].append(node)
        elif annotation.role == "split_boundary":
            self.splits.append(node)
        else:
            self.materializations.append(node)

    def problems(self, where: str) -> Iterator[str]:
        ids = sorted(self.chunks)
        if len(ids) < 2:
            num = f"{len(ids)} chunk{'' if len(ids) == 1 else 's'}"
            yield f"{where}: it has {num}; a region has two or more"
        if ids != list(range(len(ids))):
            first = self.chunks[ids[-1]][0].name
            yield (
                f"{where}: its chunks are {', '.join(map(str, ids))}, with a gap "
                f"(node {first} is of chunk {ids[-1]}); ids go from 0 up"
            )
        if len(self.producers) > 1:
            nodes = ", ".join(f"{p} made {n.name}" for p, n in sorted(self.producers.items()))
            yield f"{where}: it has two producers ({nodes}); a region has one"

    def region(self, root: str, direction: Direction) -> ChunkRegion:
        return ChunkRegion(
            root=root,
            direction=direction,
            producer=next(iter(self.producers)),
            splits=tuple(self.splits),
            chunks=tuple(tuple(self.chunks[each]) for each in sorted(self.chunks)),
            materializations=tuple(self.materializations),
        )


def _node_problems(node: Node, annotation: ChunkAnnotation) -> Iterator[str]:
    where = f"{annotation.region_root} {annotation.direction}: node {node.name}"
    if fsdp_collective(node) is not None:
        yield f"{where} belongs to FSDP, which runs once and in no chunk"
    phase = phase_of(node)
    if phase is not None and (phase == "backward") != (annotation.direction == "backward"):
        yield f"{where} is of the phase {phase}; was settle_chunk_annotations called?"
    if annotation.role != "body":
        return
    for each in node.all_input_nodes:
        other = read_annotation(each, ChunkAnnotation)
        if (
            other is not None
            and other.region_root == annotation.region_root
            and other.role == "body"
            and other.chunk_id != annotation.chunk_id
            and not _writes_in_place(each)
        ):
            yield (
                f"{where} of chunk {annotation.chunk_id} reads {each.name} of chunk "
                f"{other.chunk_id}; chunks are independent of each other"
            )


def _direction_problems(
    found: dict[tuple[str, Direction], _Collected],
) -> Iterator[str]:
    for (root, direction), collected in found.items():
        forward = found.get((root, "forward"))
        if direction == "backward" and forward is None:
            yield f"{root} backward: there is no such region forward"
        elif direction == "backward" and forward is not None:
            counts = len(forward.chunks), len(collected.chunks)
            if counts[0] != counts[1]:
                yield f"{root}: it has {counts[0]} chunks forward and {counts[1]} backward"


def _region_problems(region: ChunkRegion) -> Iterator[str]:
    for chunk_id, nodes in enumerate(region.chunks):
        own = set(nodes)
        for launch in nodes:
            if not _is_launch(launch):
                continue
            waits = list(waits_of(launch))
            waited_for = {wait.all_input_nodes[0] for wait in waits}
            # Of the operators of others, one wait may be enough for several results.
            num_needed = 1 if is_declared_launch(launch) else len(list(raw_results(launch)))
            if not num_needed <= len(waited_for) == len(waits):
                names = ", ".join(wait.name for wait in waits) or "none"
                yield (
                    f"{region}: node {launch.name} of chunk {chunk_id} needs one wait, and has "
                    f"{names}"
                )
            for wait in waits:
                if wait not in own:
                    yield (
                        f"{region}: node {wait.name} waits for {launch.name} of chunk {chunk_id} "
                        "outside of the chunk"
                    )
    first = [_launch_text(node) for node in region.launches(0)]
    for chunk_id in range(1, region.num_chunks):
        launched = [_launch_text(node) for node in region.launches(chunk_id)]
        if launched != first:
            yield (
                f"{region}: chunks differ: chunk 0 launches {_listed(first)}, and chunk "
                f"{chunk_id} {_listed(launched)}"
            )


def _is_launch(node: Node) -> bool:
    return is_collective(node) or is_declared_launch(node)


def _launch_text(launch: Node) -> str:
    exchange = read_annotation(launch, EpExchangeAnnotation)
    return f"{launch.target}" + ("" if exchange is None else f" ({exchange.kind})")


def _listed(texts: list[str]) -> str:
    return ", ".join(texts) or "none"


def _writes_in_place(node: Node) -> bool:
    """Whether a node's result is a tensor that it wrote: a buffer that chunks update in turn."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable
