"""What a step must be able to do so that its graph can be stored, whatever form of step it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from gt_trace.artifacts.container import Container
from gt_trace.artifacts.mesh_axes import MeshAxes

STEP_SECTION = "step"
"""The document that is compared between ranks."""

CapturedT = TypeVar("CapturedT")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGraph:
    """A captured graph as data."""

    step: Mapping[str, Any]
    """The document of the graph, in which ranks may differ."""

    documents: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Further documents by name, such as reports of passes."""

    blobs: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}))
    """Constant tensors of the graph by name."""

    rule_axes: tuple[str, ...] = ()
    """The axes of the mesh from which numbers of the graph follow."""


class StorableGraph(Protocol[CapturedT]):
    """A graph that is captured, or made from what was stored; nothing in it is compiled yet."""

    @property
    def kind(self) -> str:
        """What a container of it says that it holds."""

    @property
    def axes(self) -> MeshAxes:
        """Names of this rank's process groups, those of the model's tensors included."""

    @property
    def identified_by(self) -> Mapping[str, Any]:
        """What the graph depends on besides the settings of the run: see ``step_identity``."""

    def capture(self) -> CapturedT:
        """Capture it, and run the passes that a stored graph has behind it."""

    def encode(self, captured: CapturedT) -> StoredGraph:
        """What to store of it.

        Raises:
            ArtifactError: it holds something that cannot be stored; names it.
        """

    def decode(self, container: Container) -> CapturedT:
        """The graph in a container, seen to fit the model of this rank.

        Raises:
            ArtifactError: the container is damaged, or what is in it does not fit.
            VerificationError: the graph contradicts itself.
            StateMismatchError: it is for another model.
        """

    def verified(self, captured: CapturedT) -> CapturedT:
        """A graph that ``decode`` gave, verified if that has not been done there.

        One of the ranks that run the very same graph of the very same bytes does so for all.

        Raises:
            VerificationError: the graph contradicts itself.
        """
