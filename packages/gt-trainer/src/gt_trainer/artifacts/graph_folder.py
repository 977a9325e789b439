"""Stored graphs by the fingerprints of the ranks that may use them.

A fingerprint has a graph for all its ranks, or a note that each of them has its own. A rank then
adds its place on the mesh to its fingerprint, and looks again.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Generic, TypeVar

from torchtitan.tools.logging import logger

from gt_config import Fingerprint
from gt_config.errors import StaleFingerprintError
from gt_trace.artifacts.container import open_container, write_container
from gt_trace.artifacts.folder import ArtifactFolder
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.errors import ArtifactDamagedError, ArtifactError, ArtifactVersionError
from gt_trainer.artifacts.storable_graph import STEP_SECTION, StorableGraph, StoredGraph

_GRAPH = "graph"
_RULE_AXES = "axes"
_OWN_GRAPHS = "own_graphs"
_OWN_GRAPHS_KIND = "ranks that share no graph"
_PRODUCTS = "products"
_PRODUCTS_KIND = "products of a compiler"

CapturedT = TypeVar("CapturedT")
FoundT = TypeVar("FoundT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[CapturedT]):
    """A graph that was stored."""

    captured: CapturedT
    path: Path
    sha256: str
    """SHA-256 of its container, as in ``Container``."""

    rule_axes: tuple[str, ...]
    """The axes from which numbers follow, as in ``StoredGraph``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnGraphs:
    """A note that the ranks of a fingerprint share no graph: each stores one for its place."""

    reason: str
    """The first differences that no rule expresses."""


class GraphFolder:
    """Stored graphs in a folder that ranks and jobs share.

    Args:
        folder: where they lie.
        axes: of the run.
    """

    def __init__(self, folder: ArtifactFolder, *, axes: MeshAxes) -> None:
        self._folder = folder
        self._axes = axes

    def find(
        self, identity: Fingerprint, graph: StorableGraph[CapturedT]
    ) -> Loaded[CapturedT] | OwnGraphs | None:
        """Return the usable entry of a fingerprint, or None.

        A file that is damaged or stale is set aside with a warning. The graph is captured again.
        """
        path = self._own(identity, _GRAPH)
        if path is not None:
            return self._usable(path, partial(self._load, path, identity, graph))
        path = self._own(identity, _OWN_GRAPHS)
        if path is not None:
            return self._usable(path, partial(_own_graphs, path, identity))
        return None

    def write_graph(self, identity: Fingerprint, kind: str, stored: StoredGraph) -> bytes:
        """Store a graph; its bytes are returned for ranks that do not see this folder.

        A folder that cannot be written is warned of, and so is a graph that no file can hold, of
        which no bytes are returned: this rank has its graph.
        """
        documents = {
            STEP_SECTION: stored.step,
            _RULE_AXES: list(stored.rule_axes),
            **stored.documents,
        }
        return self._write_container(identity, _GRAPH, kind, documents, stored.blobs)

    def take(
        self, identity: Fingerprint, graph: StorableGraph[CapturedT], data: bytes
    ) -> Loaded[CapturedT] | None:
        """The graph that ``write_graph`` returned on another rank, stored here too if it can be.

        None if it cannot be used, which is warned of.
        """
        if self._write(identity, _GRAPH, data) is not None:
            found = self.find(identity, graph)
            if isinstance(found, Loaded):
                return found
        try:
            with tempfile.TemporaryDirectory() as scratch:
                path = Path(scratch) / _GRAPH
                path.write_bytes(data)
                return self._usable(path, partial(self._load, path, identity, graph))
        except OSError as error:  # a full disk: other ranks go on
            logger.warning(f"--compile.artifacts: a graph cannot be stored here: {error}")
            return None

    def write_own_graphs(self, identity: Fingerprint, note: OwnGraphs) -> None:
        """Store that ranks share no graph. Warns as ``write_graph`` does."""
        documents = {_OWN_GRAPHS: {"reason": note.reason}}
        self._write_container(identity, _OWN_GRAPHS, _OWN_GRAPHS_KIND, documents)

    def find_products(self, identity: Fingerprint) -> tuple[bytes, ...] | None:
        """Return the products of a compiler for the graph of a fingerprint, or None.

        It is code.
        """
        path = self._own(identity, _PRODUCTS)
        if path is None:
            return None
        return self._usable(path, partial(_products, path, identity))

    def write_products(self, identity: Fingerprint, products: Sequence[bytes]) -> None:
        """Store what a compiler made for the graph of a fingerprint."""
        blobs = {str(number): product for number, product in enumerate(products)}
        self._write_container(identity, _PRODUCTS, _PRODUCTS_KIND, blobs=blobs)

    def _own(self, identity: Fingerprint, name: str) -> Path | None:
        """An entry that this user or the machine's own wrote; None if there is none.

        Others may not decide what is trained. An entry that others may write is warned of.
        """
        path = self._folder.find(identity.digest, name)
        stranger = None if path is None else self._folder.writable_by_others(path)
        if stranger is None:
            return path
        logger.warning(
            f"--compile.artifacts: {path} is not used, since others may write to {stranger}; "
            "chmod go-w there to use it"
        )
        return None

    def _load(
        self, path: Path, identity: Fingerprint, graph: StorableGraph[CapturedT]
    ) -> Loaded[CapturedT]:
        with open_container(path, kind=graph.kind, fingerprint=identity) as container:
            axes = container.document(_RULE_AXES)
            if not isinstance(axes, list) or not all(
                isinstance(axis, str) and axis in self._axes.coordinates for axis in axes
            ):
                raise ArtifactDamagedError(
                    f"a graph names axes among {', '.join(self._axes.coordinates) or 'none'}, from "
                    f"which numbers follow, and not {axes!r}"
                )
            captured = graph.decode(container)
        return Loaded(captured=captured, path=path, sha256=container.sha256, rule_axes=tuple(axes))

    def _write_container(
        self,
        identity: Fingerprint,
        name: str,
        kind: str,
        documents: Mapping[str, Any] = MappingProxyType({}),
        blobs: Mapping[str, bytes] = MappingProxyType({}),
    ) -> bytes:
        buffer = io.BytesIO()
        try:
            write_container(
                buffer, kind=kind, fingerprint=identity, documents=documents, blobs=blobs
            )
        except (ArtifactError, ValueError) as error:
            logger.warning(f"--compile.artifacts: not stored: {error}")
            return b""
        data = buffer.getvalue()
        self._write(identity, name, data)
        return data

    def _write(self, identity: Fingerprint, name: str, data: bytes) -> Path | None:
        try:
            return self._folder.write(identity.digest, name, partial(_write_all, data))
        except (ArtifactError, OSError) as error:
            logger.warning(f"--compile.artifacts: not stored: {error}")
            return None

    def _usable(self, path: Path, read: Callable[[], FoundT]) -> FoundT | None:
        """Return the result of ``read``, or None. A file that no rank can use is set aside."""
        try:
            return read()
        except StaleFingerprintError as error:
            self._set_aside(path, f"it lies under the digest of another run: {error}")
        except (ArtifactDamagedError, ArtifactVersionError) as error:
            self._set_aside(path, str(error))
        except Exception as error:  # noqa: BLE001  # other ranks wait, and a capture is always right
            self.refuse(path, str(error))
        return None

    def refuse(self, path: Path, reason: str) -> None:
        """Warn that this rank captures, since it cannot use a graph that others may."""
        logger.warning(
            f"--compile.artifacts: {path} cannot be used by this rank, which captures: {reason}"
        )

    def _set_aside(self, path: Path, reason: str) -> None:
        try:
            kept = self._folder.set_aside(path, reason)
        except ArtifactError as error:
            logger.warning(f"--compile.artifacts: {path} cannot be used: {reason}\n  {error}")
            return
        where = "another job has removed it" if kept is None else f"it is now {kept}"
        logger.warning(
            f"--compile.artifacts: {path} cannot be used, and is captured anew: {reason}\n  {where}"
        )


def _products(path: Path, identity: Fingerprint) -> tuple[bytes, ...]:
    with open_container(path, kind=_PRODUCTS_KIND, fingerprint=identity) as container:
        return tuple(container.blob(name) for name in container.sections)


def _own_graphs(path: Path, identity: Fingerprint) -> OwnGraphs:
    with open_container(path, kind=_OWN_GRAPHS_KIND, fingerprint=identity) as container:
        document = container.document(_OWN_GRAPHS)
    match document:
        case {"reason": str(reason)}:
            return OwnGraphs(reason=reason)
    raise ArtifactDamagedError(
        f"a note that ranks share no graph holds a reason, and not {document!r}"
    )


def contents_of(path: Path) -> bytes:
    """The bytes of a stored graph; none if it is gone, as when another job has evicted it."""
    try:
        return path.read_bytes()
    except OSError as error:
        logger.warning(f"--compile.artifacts: {path} is gone: {error}")
        return b""


def at_places(
    identity: Fingerprint, axes: Sequence[str], coordinates: Mapping[str, int]
) -> Fingerprint:
    """The fingerprint of those ranks of ``identity`` that stand at the same places on ``axes``."""
    places = {f'place["{axis}"]': str(coordinates[axis]) for axis in axes}
    return Fingerprint(fields={**identity.fields, **places})


def _write_all(data: bytes, file: BinaryIO) -> None:
    file.write(data)
