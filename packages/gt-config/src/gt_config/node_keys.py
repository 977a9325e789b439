"""The contract between those who annotate graph nodes and those who read the annotations.

Torch-free on purpose: this module fixes the *names* and the *shape* of what is written, as one
small frozen dataclass per concept, and turns it to and from plain dictionaries. Touching the nodes
themselves is the business of gt-trace's accessor. Passes see the dataclasses and never a loose key.

========================  ============================  =====================================
key                       dataclass                     read by
========================  ============================  =====================================
``gt.module``             ``ModuleAnnotation``          bucketing, memory policy, chunking
``gt.phase``              ``PhaseAnnotation``           all
``gt.fsdp_collective``    ``FsdpCollectiveAnnotation``  bucketing, prefetch, pipeline split
``gt.cp_collective``      ``CpCollectiveAnnotation``    context-parallel scheduling, reports
``gt.ep_region``          ``EpRegionAnnotation``        EP overlap
``gt.ep_exchange``        ``EpExchangeAnnotation``      EP overlap
``gt.chunk``              ``ChunkAnnotation``           the overlap scheduler
``gt.pipeline``           ``PipelineAnnotation``        profiling, reports
``gt.residency``          ``ResidencyAnnotation``       recomputation, offloading, reports
========================  ============================  =====================================

Each concept has its own top-level key, so that nested annotation contexts that merge dictionaries
(``torch.fx.traceback.annotate``) compose: an exchange inside a dispatch region carries both.
Beside them stands ``gt.version``; a dictionary written with another version is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from gt_config._field_types import describe_hint, field_hints, matches_hint
from gt_config.compile_config import ChunkProducer
from gt_config.errors import NodeMetadataError, NodeMetadataVersionError

NODE_METADATA_VERSION = 1
"""Raised by one whenever a key, a field or a value changes its meaning."""

NODE_METADATA_PREFIX = "gt."
VERSION_KEY = "gt.version"
MODULE_KEY = "gt.module"
PHASE_KEY = "gt.phase"
FSDP_COLLECTIVE_KEY = "gt.fsdp_collective"
CP_COLLECTIVE_KEY = "gt.cp_collective"
EP_REGION_KEY = "gt.ep_region"
EP_EXCHANGE_KEY = "gt.ep_exchange"
CHUNK_KEY = "gt.chunk"
PIPELINE_KEY = "gt.pipeline"
RESIDENCY_KEY = "gt.residency"

Phase = Literal["forward", "loss", "backward", "optimizer"]
Direction = Literal["forward", "backward"]
FsdpCollectiveKind = Literal["unshard", "reduce_grad", "sum_parts"]
CpCollectiveKind = Literal["gather", "reduce_grad", "pass_on", "pass_on_grad"]
EpRegionKind = Literal["dispatch", "compute", "combine"]
EpExchangeKind = Literal["token_count_exchange", "token_exchange"]
ChunkRole = Literal["split_boundary", "body", "materialization"]
OverlappedBackward = Literal["FULL_BACKWARD", "BACKWARD_INPUT"]
"""The backwards that can be one graph with a forward. dW waits for nothing: it would gain nothing.
"""
PipelineAction = Literal[
    "UNSHARD",
    "FORWARD",
    OverlappedBackward,
    "BACKWARD_WEIGHT",
    "REDUCE_GRAD",
    "OVERLAP_F_B",
]
Residency = Literal["save", "recompute", "offload"]


class NodeAnnotation:
    """What the annotation dataclasses share: checks on construction, and plain dictionaries.

    Construction raises ``NodeMetadataError`` naming every field that is wrong.
    """

    __slots__ = ()

    KEY: ClassVar[str]
    """The top-level key under which the annotation stands."""

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise NodeMetadataError(f"{type(self).__name__}: " + "; ".join(problems))

    def _problems(self) -> list[str]:
        """Every field that does not hold what its hint says, in words."""
        return [
            f"{name} is {getattr(self, name)!r}, not {describe_hint(hint)}"
            for name, hint in field_hints(type(self)).items()
            if not matches_hint(getattr(self, name), hint)
        ]

    def to_meta(self) -> dict[str, object]:
        """The annotation as a plain dictionary: the version and one key. It survives JSON."""
        return {
            VERSION_KEY: NODE_METADATA_VERSION,
            self.KEY: {name: getattr(self, name) for name in field_hints(type(self))},
        }

    @classmethod
    def from_meta(cls, meta: Mapping[str, object]) -> Self | None:
        """The annotation of this concept in ``meta``, or None where there is none.

        Args:
            meta: what ``to_meta`` gave, possibly merged with other keys, ours or not.

        Raises:
            NodeMetadataVersionError: written with another version, or with none.
            NodeMetadataError: a field is missing, unknown, or of a wrong value.
        """
        if cls.KEY not in meta:
            return None
        version = meta.get(VERSION_KEY)
        if type(version) is not int or version != NODE_METADATA_VERSION:
            raise NodeMetadataVersionError(
                key=cls.KEY, found=version, expected=NODE_METADATA_VERSION
            )
        stored = meta[cls.KEY]
        if not isinstance(stored, Mapping):
            raise NodeMetadataError(f"node metadata {cls.KEY!r} is {stored!r}, not a dictionary")
        hints = field_hints(cls)
        if stored.keys() != hints.keys():
            raise NodeMetadataError(
                f"node metadata {cls.KEY!r} has the fields {sorted(map(str, stored))}, "
                f"not {sorted(hints)}"
            )
        # JSON has no tuples, so a list stands for one.
        values = tuple(
            tuple(value) if isinstance(value, list) else value
            for value in map(stored.__getitem__, hints)
        )
        try:
            annotation: Self = _checked(cls, *values)  # type: ignore[arg-type]  # a class is hashable
        except TypeError:  # of what cannot be hashed, which no field may hold
            return cls(**dict(zip(hints, values, strict=True)))
        return annotation


@functools.lru_cache(maxsize=2**14, typed=True)
def _checked(cls: type[NodeAnnotation], *values: Hashable) -> Any:
    """The annotation with these fields, in order; one for all of 10^5 nodes that have the same."""
    return cls(**dict(zip(field_hints(cls), values, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleAnnotation(NodeAnnotation):
    """The ``nn.Module`` in whose forward the node, or the forward node it differentiates, ran."""

    KEY: ClassVar[str] = MODULE_KEY

    fqn: str
    """Fully qualified name; empty for the root module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseAnnotation(NodeAnnotation):
    """The part of the training step to which the node belongs."""

    KEY: ClassVar[str] = PHASE_KEY

    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpCollectiveAnnotation(NodeAnnotation):
    """A collective that gathers parameters or reduces gradients, or its wait or views around it."""

    KEY: ClassVar[str] = FSDP_COLLECTIVE_KEY

    kind: FsdpCollectiveKind
    """unshard gathers parameters; reduce_grad reduces their gradients; sum_parts, in between, adds
    the parts of a gradient that tensor-parallel ranks have."""

    parameter_names: tuple[str, ...]
    """Fully qualified names; more than one once collectives are bucketed."""

    mesh_axis: str
    """Name of the mesh axis over which it runs; of several, with commas between."""

    def _problems(self) -> list[str]:
        problems = NodeAnnotation._problems(self)
        if self.parameter_names == ():
            problems.append("parameter_names is empty")
        return problems


@dataclass(frozen=True, slots=True, kw_only=True)
class CpCollectiveAnnotation(NodeAnnotation):
    """A collective of attention between ranks that share a sequence, its wait or views around."""

    KEY: ClassVar[str] = CP_COLLECTIVE_KEY

    kind: CpCollectiveKind
    """gather brings keys or values of the whole sequence to a rank; reduce_grad adds up, for each
    rank's part of them, the gradients that all ranks have. pass_on sends keys and values to the
    next rank; pass_on_grad sends the sums of their gradients."""

    mesh_axis: str
    """Name of the mesh axis over which it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpRegionAnnotation(NodeAnnotation):
    """The part of an expert-parallel layer to which the node belongs."""

    KEY: ClassVar[str] = EP_REGION_KEY

    kind: EpRegionKind


@dataclass(frozen=True, slots=True, kw_only=True)
class EpExchangeAnnotation(NodeAnnotation):
    """The node belongs to an exchange between expert-parallel ranks."""

    KEY: ClassVar[str] = EP_EXCHANGE_KEY

    kind: EpExchangeKind
    """token_count_exchange moves the sizes, token_exchange the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkAnnotation(NodeAnnotation):
    """The node's place in a region that runs chunk by chunk. Schedulers ignore the producer."""

    KEY: ClassVar[str] = CHUNK_KEY

    region_root: str
    """Fully qualified name of the module that was chunked."""

    role: ChunkRole
    """split_boundary makes chunks of a whole value, materialization makes them whole again."""

    chunk_id: int | None = None
    """Index of the chunk from 0; given for the role body, and only there."""

    direction: Direction
    producer: ChunkProducer

    def _problems(self) -> list[str]:
        problems = NodeAnnotation._problems(self)
        if self.role == "body" and self.chunk_id is None:
            problems.append("chunk_id is None, and the role 'body' needs one")
        if self.role != "body" and self.chunk_id is not None:
            problems.append(f"chunk_id is {self.chunk_id!r}, and only the role 'body' has one")
        if isinstance(self.chunk_id, int) and self.chunk_id < 0:
            problems.append(f"chunk_id is {self.chunk_id!r}, not 0 or more")
        return problems


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineAnnotation(NodeAnnotation):
    """The schedule action that runs the node."""

    KEY: ClassVar[str] = PIPELINE_KEY

    stage_index: int
    """Index of the virtual stage, over all ranks."""

    action: PipelineAction

    slot: int
    """Position among the actions that one graph runs: 0, and 1 for the forward of an overlapped
    pair. One graph serves every microbatch, so it has no place in a rank's list of actions."""

    def _problems(self) -> list[str]:
        problems = NodeAnnotation._problems(self)
        for name in ("stage_index", "slot"):
            value: object = getattr(self, name)
            if isinstance(value, int) and value < 0:
                problems.append(f"{name} is {value!r}, not 0 or more")
        return problems


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyAnnotation(NodeAnnotation):
    """Where a tensor that the forward makes is until the backward reads it."""

    KEY: ClassVar[str] = RESIDENCY_KEY

    residency: Residency
    """save: it stays in device memory.
    recompute: it is let go, and computed again.
    offload: it is copied to host memory, and back."""


ANNOTATION_TYPES: tuple[type[NodeAnnotation], ...] = (
    ModuleAnnotation,
    PhaseAnnotation,
    FsdpCollectiveAnnotation,
    CpCollectiveAnnotation,
    EpRegionAnnotation,
    EpExchangeAnnotation,
    ChunkAnnotation,
    PipelineAnnotation,
    ResidencyAnnotation,
)
"""Every concept, in the order of the table above."""

NODE_METADATA_KEYS: tuple[str, ...] = (VERSION_KEY, *(cls.KEY for cls in ANNOTATION_TYPES))
"""Every top-level key that this package may write into a node's metadata."""
