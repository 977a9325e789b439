"""Which memory the recordings of a graph keep, worked out before anything is recorded.

Recordings read and write fixed addresses, so what they share with the rest of a step stays:

- an input whose address changes is copied into memory that stays. All pieces share that memory: it
  is read while one of them runs, and written anew before the next. Only an input of which an output
  is a view has its own;
- what is copied to the host lands in host memory that stays, one room for each copy: at the turn
  from forward to backward nearly all of them are full;
- results that are read outside their piece stay until their last reader. Their recordings do not
  own them: pieces that are recorded later use the memory again (``cuda_graph_replay.Recorded``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from gt_passes._torch_internals import value_of
from gt_passes.analysis.aliasing import AliasClasses
from gt_passes.analysis.host_copies import OFFLOAD, offload_into
from gt_passes.analysis.liveness import peak_bytes_made_by

_ALIGNMENT = 512
"""Where the CUDA allocator puts tensors; compilers rely on 16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor lies in some memory, and how."""

    offset: int
    """In bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""

    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor, *, offset: int = 0) -> Place:
        """A place for a tensor of fixed size."""
        return cls(
            offset=offset, shape=tuple(tensor.shape), strides=tensor.stride(), dtype=tensor.dtype
        )

    @property
    def end(self) -> int:
        """The first byte behind it at which another tensor may lie."""
        extent = 0 if 0 in self.shape else 1
        for size, stride in zip(self.shape, self.strides, strict=True):
            extent += max(size - 1, 0) * stride if extent else 0
        num_bytes = extent * self.dtype.itemsize
        return self.offset + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor at this place.

        Args:
            memory: bytes, at least ``end`` of them.
        """
        elements = memory[self.offset : self.end].view(self.dtype)
        return elements.as_strided(self.shape, self.strides)


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor that are stored: what ``expand`` repeats is there once."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceMemory:
    """The memory of one piece beside its recording."""

    shared_inputs: tuple[tuple[int, Place], ...]
    """Positions of inputs to copy, and their places in the memory that all pieces share."""

    own_inputs: tuple[tuple[int, Place], ...]
    """The same, for those that keep a place of their own."""

    rooms: tuple[Place, ...]
    """In host memory: for the inputs that ``with_rooms`` adds."""

    @classmethod
    def of(cls, body: GraphModule, static_inputs: Collection[int]) -> PieceMemory:
        """What a piece needs.

        Args:
            body: of the piece, with fake values.
            static_inputs: positions of the inputs that keep their addresses.
        """
        aliases = AliasClasses(body.graph)
        shared: list[tuple[int, Place]] = []
        own: list[tuple[int, Place]] = []
        for position, node in enumerate(body.graph.find_nodes(op="placeholder")):
            if position not in static_inputs:
                places = own if aliases.holds_output(node) else shared
                places.append((position, Place.of(_tensor_of(node), offset=_end(places))))
        rooms: list[Place] = []
        for copy in _copies_to_host(body):
            rooms.append(
                Place.of(_tensor_of(copy), offset=max((room.end for room in rooms), default=0))
            )
        return cls(shared_inputs=tuple(shared), own_inputs=tuple(own), rooms=tuple(rooms))

    @property
    def shared_bytes(self) -> int:
        """Of the memory that all pieces share."""
        return _end(self.shared_inputs)

    @property
    def own_bytes(self) -> int:
        """Of its own memory for inputs."""
        return _end(self.own_inputs)

    @property
    def room_bytes(self) -> int:
        """Of host memory."""
        return max((room.end for room in self.rooms), default=0)


def with_rooms(body: GraphModule) -> GraphModule:
    """A copy of a piece that copies to rooms that it is given, behind its other inputs.

    Args:
        body: of the piece. Stays as it is.

    Returns:
        The copy; ``body`` itself if it copies nothing to the host.
    """
    if not any(True for _ in _copies_to_host(body)):
        return body
    graph = Graph()
    graph.output(graph.graph_copy(body.graph, {}))
    result = GraphModule(body, graph)  # shares constants and regions
    behind_inputs = next(node for node in graph.nodes if node.op != "placeholder")
    for number, copy in enumerate([*_copies_to_host(result)]):
        with graph.inserting_before(behind_inputs):
            room = graph.placeholder(f"room_{number}")
        room.meta = {"val": value_of(copy)}
        copy.target, copy.args = offload_into, (copy.args[0], room)
    result.recompile()
    return result


def bytes_between_pieces(graph_module: GraphModule, pieces: Collection[Node]) -> int:
    """Most bytes of results of recordings that are held at once.

    Counted from the call of a piece to the last use of its result, in the order of the graph. A
    result that is a view of an input counts too, so the memory is at most this.

    Args:
        graph_module: with the pieces in place.
        pieces: the calls.
    """
    return peak_bytes_made_by(graph_module, pieces)


def _copies_to_host(body: GraphModule) -> Iterator[Node]:
    return iter(body.graph.find_nodes(op="call_function", target=OFFLOAD))


def _end(places: Collection[tuple[int, Place]]) -> int:
    return max((place.end for _, place in places), default=0)


def _tensor_of(node: Node) -> torch.Tensor:
    value = value_of(node)
    assert isinstance(value, torch.Tensor)  # as cuda_graph_safety has asked
    return value
