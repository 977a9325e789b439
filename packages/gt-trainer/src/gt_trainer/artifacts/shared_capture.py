"""One capture for all ranks that are alike: found in a folder, or captured by a few and handed on.

All ranks go through the same steps together, and tell each other what they found after each, so
that they agree on who captures, and a rank that fails ends all:

1. Each looks under its fingerprint (``graph_folder``). Of ranks that loaded the same bytes, and
   run the same numbers of them, the lowest verifies the graph for all.
2. Ranks of one fingerprint of which none found a graph are a class (``alike_ranks``). Its lowest
   rank and a witness capture; documents are compared where the lowest rank is; more witnesses
   capture, or the class is divided, until every class has one graph.
3. The lowest rank stores it. The others take it from the folder, or get its bytes where they do not
   see that folder. It is verified as in 1.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from torchtitan.tools.logging import logger

from gt_config import Fingerprint, explain_difference
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.artifacts.rank_differences import with_rules
from gt_trace.errors import ArtifactError
from gt_trainer.artifacts.alike_ranks import (
    AlikeRanks,
    Judgement,
    RankGroup,
    judge,
)
from gt_trainer.artifacts.graph_folder import (
    Division,
    GraphFolder,
    Loaded,
    at_places,
    contents_of,
)
from gt_trainer.artifacts.rank_exchange import ALONE, RankExchange
from gt_trainer.artifacts.storable_graph import StorableGraph, StoredGraph

CapturedT = TypeVar("CapturedT")

_MOST_PATHS = 3

PIPELINE_AXIS = "pp"
"""The axis along which ranks hold other parts of a model, that may be alike but for their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedGraph(Generic[CapturedT]):
    """The graph of this rank, and where all ranks have theirs from."""

    captured: CapturedT
    identity: Fingerprint
    """With this rank's places on the axes by which its class was divided."""

    loaded_from: Path | None
    """None where this rank captured it."""

    rule_axes: tuple[str, ...]
    """The axes from which numbers of the graph follow: ranks at other places on these share the
    graph as it is stored, and run others."""

    is_first_of_its_kind: bool
    """Whether this rank is the lowest of those that run the very same graph, its numbers too, and
    stand at the same place of a pipeline."""

    groups: tuple[RankGroup, ...]
    """Of all ranks, in the order of the lowest of each."""


@dataclass(slots=True, kw_only=True)
class _Class:
    """Ranks of one fingerprint, as every rank sees them."""

    digest: str
    alike: AlikeRanks
    reason: str = ""
    round_number: int = field(init=False)
    is_settled: bool = False
    can_be_stored: bool = True
    num_rules: int = 0
    rule_axes: tuple[str, ...] = ()
    captured_by: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.round_number = self.alike.first_round

    @property
    def origin(self) -> int:
        return self.alike.ranks[0]

    @property
    def wanted(self) -> tuple[int, ...]:
        """Who must have captured before the next judgement."""
        return self.alike.witnesses(self.round_number)


def share_capture(
    identity: Fingerprint,
    graph: StorableGraph[CapturedT],
    *,
    folder: GraphFolder,
    axes: MeshAxes,
    exchange: RankExchange,
) -> SharedGraph[CapturedT]:
    """The graph of this rank: stored before, captured here, or captured by another rank.

    Every rank of the run calls this together.

    Args:
        identity: of this rank's graph.
        graph: how it is captured, stored and made of what is stored.
        folder: where graphs are looked for and stored.
        axes: where this rank stands.
        exchange: the ranks.

    Raises:
        Exception: whatever the capture raises, on the rank that captured.
        CaptureFailedElsewhereError: another rank's capture failed.
        RankLostError: another rank has ended, or did not answer in time.
    """
    return _Sharing(identity, graph, folder=folder, axes=axes, exchange=exchange).run()


def capture_alone(
    identity: Fingerprint,
    graph: StorableGraph[CapturedT],
    *,
    folder: GraphFolder,
    axes: MeshAxes,
) -> SharedGraph[CapturedT]:
    """The graph of this rank without a word to others: stored before, or captured here.

    Nothing says then that it is the graph of any other rank, so that it is stored for ranks that
    stand where this one stands.

    Raises what ``share_capture`` raises.
    """
    identity = at_places(identity, tuple(axes.coordinates), axes.coordinates)
    return share_capture(identity, graph, folder=folder, axes=axes, exchange=ALONE)


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
        self._loaded: Loaded[CapturedT] | None = None
        self._is_verified = False
        """Whether what is loaded has been verified, here or by a rank that loaded the same."""

        self._documents: dict[int, Any] = {}
        """Of ranks of the class of which this rank is the lowest, those that were compared."""

        self._digests: dict[int, str | None] = {}
        """SHA-256 of the document of each rank that has captured; None: it cannot be stored."""

    def run(self) -> SharedGraph[CapturedT]:
        classes, holders = self._look()
        self._explain(classes)
        searching = [each for each in classes if not holders[each.digest]]
        settled = [each for each in classes if holders[each.digest]]
        while searching:
            self._capture_where_wanted(searching)
            searching = self._judge(searching)
            settled += [each for each in searching if each.is_settled]
            searching = [each for each in searching if not each.is_settled]
        settled.sort(key=lambda each: each.origin)
        self._hand_on(settled, holders)
        self._capture_what_nobody_gave()
        own = next(each for each in settled if self._rank in each.alike.coordinates)
        captured, rule_axes = self._captured, own.rule_axes
        if captured is None:
            assert self._loaded is not None
            captured = self._loaded.captured
        if self._loaded is not None:
            rule_axes = self._loaded.rule_axes
        return SharedGraph(
            captured=captured,
            identity=self._identity,
            loaded_from=self._loaded.path if self._loaded is not None else None,
            rule_axes=rule_axes,
            is_first_of_its_kind=_is_first(own.alike, self._rank, rule_axes),
            groups=tuple(
                RankGroup(
                    ranks=each.alike.ranks,
                    captured_by=tuple(each.captured_by),
                    num_rules=each.num_rules,
                    rule_axes=each.rule_axes,
                    reason=each.reason,
                )
                for each in settled
            ),
        )

    def _look(self) -> tuple[list[_Class], dict[str, list[int]]]:
        """Classes of ranks, and which ranks of each found their graph."""
        found: Loaded[CapturedT] | Division | None = None
        reasons: dict[str, str] = {}
        is_new = True
        while True:
            if is_new:
                found = self._folder.find(self._identity, self._graph)
            rows = self._exchange.gather(
                {
                    "identity": self._identity.digest,
                    "coordinates": dict(self._coordinates),
                    "loaded": self._contents(found),
                    "division": {"axes": list(found.axes), "reason": found.reason}
                    if isinstance(found, Division)
                    else None,
                }
            )
            divisions = {row["identity"]: row["division"] for row in rows if row["division"]}
            if not divisions:
                break
            is_new = self._identity.digest in divisions
            if is_new:
                division = divisions[self._identity.digest]
                self._identity = at_places(self._identity, division["axes"], self._coordinates)
                reasons[self._identity.digest] = division["reason"]
        if isinstance(found, Loaded):
            self._loaded = found
        are_usable = self._verify_for_others([row["loaded"] for row in rows])
        members: dict[str, dict[int, Mapping[str, int]]] = {}
        holders: dict[str, list[int]] = {}
        for rank, row in enumerate(rows):
            members.setdefault(row["identity"], {})[rank] = row["coordinates"]
            holders.setdefault(row["identity"], [])
            if are_usable[rank]:
                holders[row["identity"]].append(rank)
        classes = [
            _Class(
                digest=digest,
                alike=AlikeRanks(coordinates=ranks),
                is_settled=bool(holders[digest]),
                reason=reasons.get(digest, ""),
            )
            for digest, ranks in members.items()
        ]
        return classes, holders

    def _explain(self, classes: list[_Class]) -> None:
        """Say of each class why it is not that of the lowest rank, by what they know before."""
        if len(classes) < 2:
            return
        own = self._identity.to_json().encode() if self._rank == classes[0].origin else None
        first = Fingerprint.from_json(
            self._exchange.broadcast(own, source=classes[0].origin).decode()
        )
        paths = [each.path for each in explain_difference(first, self._identity)]
        reasons = self._exchange.gather(_listed(paths))
        for each in classes[1:]:
            each.reason = each.reason or reasons[each.origin]

    def _capture_where_wanted(self, classes: list[_Class]) -> None:
        wanted = {rank for each in classes for rank in each.wanted} - self._digests.keys()
        failed: Exception | None = None
        digest: str | None = None
        if self._rank in wanted:
            try:
                self._captured = self._graph.capture()
                digest = self._encode()
            except Exception as error:  # noqa: BLE001  # other ranks must hear of whatever it is
                failed = error
        self._exchange.all_succeeded(failed, what="could not capture its graph")
        digests = self._exchange.gather(digest)
        self._digests.update({rank: digests[rank] for rank in wanted})

    def _encode(self) -> str | None:
        assert self._captured is not None
        try:
            self._stored = self._graph.encode(self._captured)
        except ArtifactError as error:
            logger.warning(f"--compile.artifacts: this graph cannot be stored: {error}")
            return None
        return hashlib.sha256(_document_bytes(self._stored.step)).hexdigest()

    def _judge(self, classes: list[_Class]) -> list[_Class]:
        """Settle classes, ask for more witnesses, or divide; the classes there are then."""
        judged: list[_Class] = []
        failed: Exception | None = None
        own_verdict: dict[str, Any] | None = None
        try:
            own_verdict = self._own_verdict(self._collect(classes))
        except Exception as error:  # noqa: BLE001  # other ranks must hear of whatever it is
            failed = error
        self._exchange.all_succeeded(failed, what="could not compare captures")
        verdicts = self._exchange.gather(own_verdict)
        for each in classes:
            each.captured_by = [r for r in each.alike.ranks if r in self._digests]
            verdict = verdicts[each.origin]
            if verdict["axes"]:
                judged += self._divide(each, verdict)
                continue
            each.round_number += verdict["needs_more"]
            each.is_settled = not verdict["needs_more"]
            each.can_be_stored = verdict["can_be_stored"]
            each.num_rules, each.rule_axes = verdict["num_rules"], tuple(verdict["rule_axes"])
            judged.append(each)
        return judged

    def _collect(self, classes: list[_Class]) -> _Class | None:
        """Bring documents to the lowest rank of each class; the class in which that is this rank.

        Those that equal its own stay where they are.
        """
        own: _Class | None = None
        arrived: dict[int, bytes] = {}
        for each in classes:
            if each.origin == self._rank:
                own = each
                assert self._stored is not None or self._digests[self._rank] is None
            for rank in each.wanted[1:]:
                if self._digests[rank] in (None, self._digests[each.origin]):
                    continue
                if self._rank == rank:
                    assert self._stored is not None
                    self._exchange.send(_document_bytes(self._stored.step), to=each.origin)
                elif self._rank == each.origin:
                    arrived[rank] = self._exchange.receive(source=rank)
        # Only now, since a rank that failed here would leave others waiting to be heard.
        self._documents.update({rank: json.loads(data) for rank, data in arrived.items()})
        return own

    def _own_verdict(self, own: _Class | None) -> dict[str, Any] | None:
        if own is None:
            return None
        judgement, can_be_stored = Judgement(), True
        if None in (self._digests[rank] for rank in own.wanted):
            can_be_stored = False
        else:
            assert self._stored is not None
            document = json.loads(_document_bytes(self._stored.step))
            captures = {rank: self._documents.get(rank, document) for rank in own.wanted}
            judgement = judge(own.alike, captures, round_number=own.round_number)
            self._finish(own, judgement, document)
        return {
            "axes": list(judgement.divided_by),
            "needs_more": judgement.needs_more,
            "can_be_stored": can_be_stored,
            "num_rules": len(judgement.rules),
            "rule_axes": judgement.rule_axes,
            "reason": "; ".join(map(str, judgement.examples)),
        }

    def _finish(self, own: _Class, judgement: Judgement, document: Any) -> None:
        """Put rules into what this rank will store, or store that its class is divided."""
        if judgement.divided_by:
            reason = "; ".join(map(str, judgement.examples))
            self._folder.write_division(
                self._identity, Division(axes=judgement.divided_by, reason=reason)
            )
        elif judgement.rules:
            assert self._stored is not None
            self._stored = StoredGraph(
                step=with_rules(document, judgement.rules),
                documents=self._stored.documents,
                blobs=self._stored.blobs,
                rule_axes=tuple(judgement.rule_axes),
            )

    def _divide(self, divided: _Class, verdict: Mapping[str, Any]) -> list[_Class]:
        axes = tuple(verdict["axes"])
        if self._rank in divided.alike.coordinates:
            self._identity = at_places(self._identity, axes, self._coordinates)
            self._documents.clear()
        return [
            _Class(
                # A name for those that are not in it: only its members know its fingerprint.
                digest=f"{divided.digest} at {[part.coordinates[part.ranks[0]][a] for a in axes]}",
                alike=part,
                reason=verdict["reason"],
            )
            for part in divided.alike.divided(axes)
        ]

    def _hand_on(self, classes: list[_Class], holders: Mapping[str, list[int]]) -> None:
        """Let every rank of a class have the graph of the rank that has it."""
        own = next(each for each in classes if self._rank in each.alike.coordinates)
        is_source = self._rank == _source(own, holders)
        written = b""
        if is_source and own.can_be_stored and self._stored is not None:
            written = self._folder.write_graph(self._identity, self._graph.kind, self._stored)
        self._exchange.gather(None)  # from here on, what is stored can be found
        if self._lacks(own):
            self._find_again()
        lacking = self._exchange.gather(self._lacks(own))
        for each in classes:
            if not any(lacking[rank] for rank in each.alike.ranks):
                continue
            data: bytes | None = None
            if each is own and is_source:
                data = written if self._loaded is None else contents_of(self._loaded.path)
            received = self._exchange.broadcast(data, source=_source(each, holders))
            if received and each is own and self._lacks(own):
                self._loaded = self._folder.take(self._identity, self._graph, received)
        unverified = None if self._is_verified else self._contents(self._loaded)
        self._verify_for_others(self._exchange.gather(unverified))

    def _contents(self, found: Loaded[CapturedT] | Division | None) -> list[str] | None:
        """What a loaded graph is told by: ranks with equal ones run the very same graph."""
        if not isinstance(found, Loaded):
            return None
        axes = [axis for axis in (*found.rule_axes, PIPELINE_AXIS) if axis in self._coordinates]
        places = [f"{axis} {self._coordinates[axis]}" for axis in axes]
        return [self._identity.digest, found.sha256, *places]

    def _verify_for_others(self, contents: Sequence[list[str] | None]) -> list[bool]:
        """Verify each graph that ranks have loaded, on the lowest rank that has the very same one.

        Args:
            contents: by rank: ``_contents`` of what it loaded; None if nothing is to be verified.

        Returns:
            By rank, whether it has a graph that was found sound.
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

    def _capture_what_nobody_gave(self) -> None:
        """Capture where what others have cannot be used; they hear of it if that fails."""
        failed: Exception | None = None
        if self._loaded is None and self._captured is None:
            try:
                self._captured = self._graph.capture()
            except Exception as error:  # noqa: BLE001  # other ranks must hear of whatever it is
                failed = error
        self._exchange.all_succeeded(failed, what="could not capture its graph")

    def _lacks(self, own: _Class) -> bool:
        return own.can_be_stored and self._loaded is None and self._captured is None

    def _find_again(self) -> None:
        found = self._folder.find(self._identity, self._graph)
        if isinstance(found, Loaded):
            self._loaded = found


def _listed(paths: Sequence[str]) -> str:
    shown = ", ".join(paths[:_MOST_PATHS])
    more = len(paths) - _MOST_PATHS
    return f"other ranks have another {shown}" + (f" and {more} more" if more > 0 else "")


def _is_first(alike: AlikeRanks, rank: int, rule_axes: Sequence[str]) -> bool:
    axes = [axis for axis in (*rule_axes, PIPELINE_AXIS) if axis in alike.coordinates[rank]]
    (part,) = (part for part in alike.divided(axes) if rank in part.coordinates)
    return part.ranks[0] == rank


def _source(of: _Class, holders: Mapping[str, list[int]]) -> int:
    """The rank from which the others of a class have their graph."""
    held = holders.get(of.digest, [])
    return held[0] if held else of.origin


def _document_bytes(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
