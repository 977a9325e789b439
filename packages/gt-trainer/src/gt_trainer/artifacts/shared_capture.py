"""One capture for all ranks that are alike: found in a folder, or captured by a few and handed on.

All ranks go through the same steps together. After each step they exchange what they found, so that
a failure on one rank ends all.

1. Each rank looks under its fingerprint (``graph_folder``). Of the ranks that loaded the same
   bytes, and run the same numbers of them, the lowest verifies the graph for all.
2. Ranks of one fingerprint of which none found a graph are a class (``alike_ranks``). Its witnesses
   capture. The lowest of them compares the documents.
3. If the documents agree, the lowest rank stores the graph. The others read it from the folder, or
   receive its bytes where they do not see that folder. It is verified as in step 1.
4. If they do not agree, every rank of the class captures and stores its own graph.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from torchtitan.tools.logging import logger

from gt_config import Fingerprint, explain_difference
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.artifacts.rank_differences import compare_documents, with_rules
from gt_trace.errors import ArtifactError
from gt_trainer.artifacts.alike_ranks import PIPELINE_AXIS, AlikeRanks, RankGroup
from gt_trainer.artifacts.graph_folder import (
    GraphFolder,
    Loaded,
    OwnGraphs,
    at_places,
    contents_of,
)
from gt_trainer.artifacts.rank_exchange import RankExchange
from gt_trainer.artifacts.storable_graph import StorableGraph, StoredGraph

CapturedT = TypeVar("CapturedT")

_MOST_PATHS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedGraph(Generic[CapturedT]):
    """The graph of this rank, and where all ranks have theirs from."""

    captured: CapturedT
    identity: Fingerprint
    """The fingerprint under which the graph is stored. It has the place of this rank if its class
    shares no graph."""

    loaded_from: Path | None
    """The file that was loaded; None if this rank captured the graph."""

    rule_axes: tuple[str, ...]
    """The axes from which numbers of the graph follow: ranks at other places on these share the
    graph as it is stored, and run others."""

    is_first_of_its_kind: bool
    """Whether this rank is the lowest of those that run the very same graph, its numbers too, and
    stand at the same place of a pipeline."""

    groups: tuple[RankGroup, ...]
    """The groups of all ranks, in the order of the lowest rank of each."""


@dataclass(slots=True, kw_only=True)
class _Class:
    """Ranks of one fingerprint, as every rank sees them."""

    alike: AlikeRanks
    holders: list[int]
    """The ranks that found a sound graph."""

    is_shared: bool
    """Whether all run one graph."""

    is_storable: bool = True
    reason: str
    num_rules: int = 0
    rule_axes: tuple[str, ...] = ()
    captured_by: tuple[int, ...] = ()

    @property
    def source(self) -> int:
        """The rank from which the others have their graph."""
        return self.holders[0] if self.holders else self.alike.ranks[0]


def share_capture(
    identity: Fingerprint,
    graph: StorableGraph[CapturedT],
    *,
    folder: GraphFolder,
    axes: MeshAxes,
    exchange: RankExchange,
    is_placed: bool = False,
) -> SharedGraph[CapturedT]:
    """Return the graph of this rank: stored before, captured here, or captured by another rank.

    Every rank of the run calls this together.

    Args:
        identity: of this rank's graph.
        graph: how it is captured, stored and made of what is stored.
        folder: where graphs are looked for and stored.
        axes: where this rank stands.
        exchange: the ranks.
        is_placed: whether a solver placed the model.

    Raises:
        Exception: whatever the capture raises, on the rank that captured.
        CaptureFailedElsewhereError: another rank's capture failed.
        RankLostError: another rank has ended, or did not answer in time.
    """
    sharing = _Sharing(identity, graph, folder=folder, axes=axes, exchange=exchange)
    return sharing.run(is_placed=is_placed)


class _Sharing(Generic[CapturedT]):
    def __init__(
        self,
        identity: Fingerprint,
        graph: StorableGraph[CapturedT],
        *,
        folder: GraphFolder,
        axes: MeshAxes,
        exchange: RankExchange,
    ) -> None:
        self._identity = identity
        self._graph = graph
        self._folder = folder
        self._coordinates = axes.coordinates
        self._exchange = exchange
        self._rank = exchange.rank
        self._captured: CapturedT | None = None
        self._stored: StoredGraph | None = None
        self._document: bytes | None = None
        """The document of the captured graph, if it can be stored."""

        self._loaded: Loaded[CapturedT] | None = None
        self._is_verified = False
        """Whether what is loaded has been verified, here or by a rank that loaded the same."""

    def run(self, *, is_placed: bool) -> SharedGraph[CapturedT]:
        classes = self._look(is_placed)
        own = next(each for each in classes if self._rank in each.alike.coordinates)
        searching = [each for each in classes if each.is_shared and not each.holders]
        if searching:
            self._compare(searching, own)
        self._hand_on(classes, own)
        self._capture_own(classes, own)
        captured, rule_axes = self._captured, own.rule_axes
        if self._loaded is not None:
            captured, rule_axes = self._loaded.captured, self._loaded.rule_axes
        assert captured is not None
        first = own.alike.first_of_its_kind(self._rank, rule_axes) if own.is_shared else self._rank
        return SharedGraph(
            captured=captured,
            identity=self._identity,
            loaded_from=self._loaded.path if self._loaded is not None else None,
            rule_axes=rule_axes,
            is_first_of_its_kind=first == self._rank,
            groups=tuple(
                RankGroup(
                    ranks=each.alike.ranks,
                    captured_by=each.captured_by,
                    is_shared=each.is_shared or len(each.alike.ranks) == 1,
                    num_rules=each.num_rules,
                    rule_axes=each.rule_axes,
                    reason=each.reason,
                )
                for each in classes
            ),
        )

    def _look(self, is_placed: bool) -> list[_Class]:
        """Return the classes of ranks, with what each found."""
        own = self._identity
        found = self._folder.find(own, self._graph)
        rows = self._exchange.gather(
            {
                "identity": own.digest,
                "coordinates": dict(self._coordinates),
                "apart": found.reason if isinstance(found, OwnGraphs) else None,
            }
        )
        members: dict[str, dict[int, Mapping[str, int]]] = {}
        apart: dict[str, str] = {}
        for rank, row in enumerate(rows):
            members.setdefault(row["identity"], {})[rank] = row["coordinates"]
            if row["apart"] is not None:
                apart[row["identity"]] = row["apart"]
        if own.digest in apart:
            self._identity = self._at_own_place()
            found = self._folder.find(self._identity, self._graph)
        if isinstance(found, Loaded):
            self._loaded = found
        are_usable = self._verify_for_others(self._exchange.gather(self._contents()))
        reasons = self._reasons(own, [min(ranks) for ranks in members.values()])
        return [
            _Class(
                alike=AlikeRanks(coordinates=ranks, is_placed=is_placed),
                holders=[rank for rank in ranks if are_usable[rank]],
                is_shared=digest not in apart,
                reason=apart.get(digest, reasons[min(ranks)]),
            )
            for digest, ranks in members.items()
        ]

    def _reasons(self, own: Fingerprint, origins: Sequence[int]) -> dict[int, str]:
        """Return why each class is not the one of the lowest rank, by the lowest rank of each."""
        if len(origins) == 1:
            return dict.fromkeys(origins, "")
        data = own.to_json().encode() if self._rank == origins[0] else None
        first = Fingerprint.from_json(self._exchange.broadcast(data, source=origins[0]).decode())
        paths = [each.path for each in explain_difference(first, own)]
        reasons = self._exchange.gather(_listed(paths) if paths else "")
        return {rank: reasons[rank] for rank in origins}

    def _compare(self, classes: Sequence[_Class], own: _Class) -> None:
        """Capture on the witnesses of classes, and settle which classes share a graph."""
        for each in classes:
            each.captured_by = each.alike.witnesses
        self._capture(own in classes and self._rank in own.captured_by, is_stored=True)
        document = self._document
        digests = self._exchange.gather(document and hashlib.sha256(document).hexdigest())
        arrived = self._collect(classes, digests)
        failed: Exception | None = None
        verdict: dict[str, Any] | None = None
        if own in classes and self._rank == own.source:
            try:
                if all(digests[rank] is not None for rank in own.captured_by):
                    assert document is not None
                    verdict = self._verdict(own, document, arrived)
            except Exception as error:  # noqa: BLE001  # other ranks must hear of whatever it is
                failed = error
        self._exchange.all_succeeded(failed, what="could not compare captures")
        verdicts = self._exchange.gather(verdict)
        for each in classes:
            found = verdicts[each.source]
            each.is_shared = found is not None and not found["reason"]
            each.is_storable = found is not None
            if found is not None:
                each.reason = found["reason"] or each.reason
                each.num_rules, each.rule_axes = found["num_rules"], tuple(found["rule_axes"])

    def _collect(
        self, classes: Sequence[_Class], digests: Sequence[str | None]
    ) -> dict[int, bytes]:
        """Broadcast the documents that differ from the one of the lowest rank of their class.

        Returns:
            The documents for this rank to compare, by rank.
        """
        arrived: dict[int, bytes] = {}
        for each in classes:
            ours = digests[each.source]
            for rank in each.captured_by[1:]:
                if ours is None or digests[rank] in (None, ours):
                    continue
                sent = self._document if self._rank == rank else None
                received = self._exchange.broadcast(sent, source=rank)
                if self._rank == each.source:
                    arrived[rank] = received
        return arrived

    def _verdict(
        self, own: _Class, document: bytes, arrived: Mapping[int, bytes]
    ) -> dict[str, Any]:
        """Compare the documents of this rank's class, and prepare what is to be stored."""
        assert self._stored is not None
        ours = json.loads(document)
        documents = {
            rank: json.loads(arrived[rank]) if rank in arrived else ours for rank in own.captured_by
        }
        comparison = compare_documents(documents, own.alike.coordinates)
        if comparison.unruled:
            self._folder.write_own_graphs(self._identity, OwnGraphs(reason=comparison.reason()))
        elif comparison.rules:
            self._stored = replace(
                self._stored,
                step=with_rules(ours, comparison.rules),
                rule_axes=comparison.rule_axes,
            )
        return {
            "reason": comparison.reason(),
            "num_rules": 0 if comparison.unruled else len(comparison.rules),
            "rule_axes": () if comparison.unruled else comparison.rule_axes,
        }

    def _hand_on(self, classes: Sequence[_Class], own: _Class) -> None:
        """Give every rank of a class that shares a graph the graph of the rank that has it."""
        is_source = own.is_shared and self._rank == own.source
        written = b""
        if is_source and self._loaded is None:
            written = self._write()
        self._exchange.gather(None)  # from here on, what is stored can be found
        if self._lacks(own):
            found = self._folder.find(self._identity, self._graph)
            self._loaded = found if isinstance(found, Loaded) else None
        lacking = self._exchange.gather(self._lacks(own))
        for each in classes:
            if not any(lacking[rank] for rank in each.alike.ranks):
                continue
            data: bytes | None = None
            if each is own and is_source:
                data = written if self._loaded is None else contents_of(self._loaded.path)
            received = self._exchange.broadcast(data, source=each.source)
            if received and each is own and self._lacks(own):
                self._loaded = self._folder.take(self._identity, self._graph, received)
        unverified = None if self._is_verified else self._contents()
        self._verify_for_others(self._exchange.gather(unverified))

    def _capture_own(self, classes: Sequence[_Class], own: _Class) -> None:
        """Capture where no other rank has a graph that this one can use; store it if apart."""
        is_stored = not own.is_shared and own.is_storable
        self._capture(self._loaded is None and self._captured is None, is_stored=is_stored)
        if not own.is_shared:
            self._identity = self._at_own_place()
        if is_stored:
            self._write()
        captured = self._exchange.gather(self._captured is not None)
        for each in classes:
            if not each.is_shared:
                each.captured_by = tuple(rank for rank in each.alike.ranks if captured[rank])

    def _capture(self, is_wanted: bool, *, is_stored: bool) -> None:
        """Capture on the ranks where that is wanted. All ranks raise if a capture fails.

        Args:
            is_wanted: whether this rank captures.
            is_stored: whether the graph is encoded too.
        """
        failed: Exception | None = None
        if is_wanted:
            try:
                self._captured = self._graph.capture()
                if is_stored:
                    self._stored = self._graph.encode(self._captured)
                    self._document = _document_bytes(self._stored.step)
            except ArtifactError as error:
                if self._captured is None:
                    failed = error
                else:
                    logger.warning(f"--compile.artifacts: this graph cannot be stored: {error}")
            except Exception as error:  # noqa: BLE001  # other ranks must hear of whatever it is
                failed = error
        self._exchange.all_succeeded(failed, what="could not capture its graph")

    def _write(self) -> bytes:
        """Store the graph that was captured here, if any. Return its bytes."""
        if self._stored is None:
            return b""
        return self._folder.write_graph(self._identity, self._graph.kind, self._stored)

    def _at_own_place(self) -> Fingerprint:
        return at_places(self._identity, tuple(self._coordinates), self._coordinates)

    def _lacks(self, own: _Class) -> bool:
        return own.is_shared and self._loaded is None and self._captured is None

    def _contents(self) -> list[str] | None:
        """Return what tells the loaded graph: ranks with equal ones run the very same graph."""
        found = self._loaded
        if found is None:
            return None
        axes = [axis for axis in (*found.rule_axes, PIPELINE_AXIS) if axis in self._coordinates]
        places = [f"{axis} {self._coordinates[axis]}" for axis in axes]
        return [self._identity.digest, found.sha256, *places]

    def _verify_for_others(self, contents: Sequence[list[str] | None]) -> list[bool]:
        """Verify each graph that ranks have loaded, on the lowest rank that has the very same one.

        Args:
            contents: by rank, its ``_contents``; None if nothing is to be verified.

        Returns:
            Whether a rank has a sound graph, by rank.
        """
        own = contents[self._rank]
        problem: str | None = None
        if own is not None and contents.index(own) == self._rank:
            assert self._loaded is not None
            try:
                verified = self._graph.verified(self._loaded.captured)
                self._loaded = replace(self._loaded, captured=verified)
            except Exception as error:  # noqa: BLE001  # other ranks wait, and a capture is always right
                problem = str(error)
        if all(each is None for each in contents):
            return [False] * len(contents)
        problems: Sequence[str | None] = self._exchange.gather(problem)
        if own is not None:
            self._is_verified = True
            refused = problems[contents.index(own)]
            if refused is not None and self._loaded is not None:
                self._folder.refuse(self._loaded.path, refused)
                self._loaded, self._is_verified = None, False
        return [each is not None and problems[contents.index(each)] is None for each in contents]


def _listed(paths: Sequence[str]) -> str:
    shown = ", ".join(paths[:_MOST_PATHS])
    more = len(paths) - _MOST_PATHS
    return f"other ranks have another {shown}" + (f" and {more} more" if more > 0 else "")


def _document_bytes(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
