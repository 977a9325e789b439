"""Ranks as threads of one process, which exchange as ``RankExchange`` does, and graphs of no nodes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from gt_config import Fingerprint
from gt_trace.artifacts.container import Container
from gt_trace.artifacts.coordinate_rules import decoded_rule
from gt_trace.artifacts.folder import ArtifactFolder
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.errors import ArtifactError
from gt_trainer.artifacts.graph_folder import GraphFolder
from gt_trainer.artifacts.rank_exchange import RankExchange
from gt_trainer.artifacts.shared_capture import SharedGraph, share_capture
from gt_trainer.artifacts.storable_graph import STEP_SECTION, StoredGraph

Coordinates = Mapping[str, int]
SECONDS = 20


class _Wires:
    """What connects the threads."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=SECONDS)
        self.board: list[Any] = [None] * num_ranks
        self.num_broadcasts = 0


@dataclass(frozen=True, kw_only=True)
class ThreadExchange:
    """One thread among others, with the methods of ``RankExchange``."""

    rank: int
    wires: _Wires

    def gather(self, row: object) -> list[Any]:
        self.wires.board[self.rank] = json.dumps(row)
        self.wires.barrier.wait()
        rows = [json.loads(each) for each in self.wires.board]
        self.wires.barrier.wait()
        return rows

    def broadcast(self, data: bytes | None, *, source: int) -> bytes:
        assert (data is not None) == (self.rank == source)
        if self.rank == source:
            self.wires.board[source] = data
            self.wires.num_broadcasts += 1
        self.wires.barrier.wait()
        received: bytes = self.wires.board[source]
        self.wires.barrier.wait()
        return received

    all_succeeded = RankExchange.all_succeeded


@dataclass(kw_only=True)
class NumberGraph:
    """A "graph" of one node whose arguments are the numbers of a rank."""

    rank: int
    coordinates: Coordinates
    numbers_of: Callable[[Coordinates], list[Any]]
    fails_on: int | None = None
    refuses_on: int | None = None
    is_sound: Callable[[list[Any]], bool] = lambda numbers: True
    """What the verifier says of a graph."""
    is_storable: bool = True
    captures: list[int] = field(default_factory=list)
    """Ranks that captured."""
    verifications: list[int] = field(default_factory=list)
    """Ranks that verified what they loaded."""

    kind = "numbers"

    def capture(self) -> list[Any]:
        self.captures.append(self.rank)
        if self.rank == self.fails_on:
            raise ZeroDivisionError("no capture here")
        return self.numbers_of(self.coordinates)

    def encode(self, captured: list[Any]) -> StoredGraph:
        if not self.is_storable:
            raise ArtifactError("the operator mine::own is not in the list")
        return StoredGraph(step={"nodes": [["c", "name", 0, captured, {}, []]]})

    def decode(self, container: Container) -> list[Any]:
        if self.rank == self.refuses_on:
            raise ArtifactError("a value is missing here")
        (node,) = container.document(STEP_SECTION)["nodes"]
        return [
            decoded_rule(each).at(self.coordinates) if isinstance(each, list) else each
            for each in node[3]
        ]

    def verified(self, captured: list[Any]) -> list[Any]:
        self.verifications.append(self.rank)
        if not self.is_sound(captured):
            raise ValueError(f"the numbers {captured} contradict each other")
        return captured


@dataclass(frozen=True, kw_only=True)
class Start:
    """What came of one start of all ranks."""

    shared: list[SharedGraph[list[Any]] | Exception]
    captures: list[int]
    verifications: list[int]
    num_broadcasts: int


def start(
    places: list[Coordinates],
    numbers_of: Callable[[Coordinates], list[Any]],
    *,
    folder_of: Callable[[int], ArtifactFolder],
    identity_of: Callable[[Coordinates], dict[str, str]] = lambda at: {"model": "one"},
    is_placed: bool = False,
    **graph: Any,
) -> Start:
    """Let every rank obtain its graph."""
    wires = _Wires(len(places))
    captures: list[int] = []
    verifications: list[int] = []

    def obtain(rank: int) -> SharedGraph[list[Any]] | Exception:
        axes = MeshAxes(coordinates=places[rank])
        try:
            return share_capture(
                Fingerprint(fields=identity_of(places[rank])),
                NumberGraph(
                    rank=rank,
                    coordinates=places[rank],
                    numbers_of=numbers_of,
                    captures=captures,
                    verifications=verifications,
                    **graph,
                ),
                folder=GraphFolder(folder_of(rank), axes=axes),
                axes=axes,
                exchange=ThreadExchange(rank=rank, wires=wires),  # type: ignore[arg-type]  # its methods
                is_placed=is_placed,
            )
        except Exception as error:  # noqa: BLE001  # a test looks at it
            return error

    with ThreadPoolExecutor(len(places)) as pool:
        shared = list(pool.map(obtain, range(len(places))))
    return Start(
        shared=shared,
        captures=sorted(captures),
        verifications=sorted(verifications),
        num_broadcasts=wires.num_broadcasts,
    )
