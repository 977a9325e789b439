"""The capture of a pipeline stage: made here, or stored and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from torch import nn
from torch.fx import GraphModule

from gt_config.graph_kinds import GraphKind
from gt_passes import PassManagerReport, pass_report_as_data, pass_report_from_data
from gt_pipeline.graph import RewrittenStage, decode_stage, encode_stage
from gt_pipeline.graph.action_graph import ActionGraph
from gt_pipeline.graph.stage_inputs import StageState
from gt_trace.artifacts.container import Container
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.errors import ArtifactError
from gt_trainer.artifacts.stage_names import StageNames
from gt_trainer.artifacts.storable_graph import STEP_SECTION, StoredGraph
from gt_trainer.startup import StartupClock
from gt_trainer.steps.layer_tracer import CaptureLayersReport
from gt_trainer.steps.training_step import num_operators

_PASSES = "passes"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCaptureReport:
    """What the capture of a stage produced, for the log."""

    num_stages: int
    """Of the whole pipeline."""

    actions: tuple[ActionGraph, ...]
    """Of the stage, after passes."""

    passes: tuple[PassManagerReport, ...]
    """What they did on the joint graph, and on those of the actions."""

    stamping: CaptureLayersReport | None = None
    """How the joint graph's layers were stamped, or why not; None if that was not asked for, or not
    done here."""

    is_loaded: bool = False
    """Whether the graphs were captured by another rank or run, and stored."""

    @property
    def graph_modules(self) -> tuple[GraphModule, ...]:
        """The graphs of the stage's actions, after passes."""
        return tuple(action.graph_module for action in self.actions)

    def memory_text(self) -> None:
        """A stage keeps what its schedule asks for, which no graph of one action shows."""

    def __str__(self) -> str:
        """One line: the stage, and the operators of its actions."""
        counts = ", ".join(f"{a.kind} {num_operators(a.graph_module):,}" for a in self.actions)
        verb = "Loaded" if self.is_loaded else "Captured"
        stamping = f" ({self.stamping})" if self.stamping and self.stamping.stamped else ""
        return (
            f"{verb} stage {self.actions[0].stage_index} of {self.num_stages}{stamping}; "
            f"operators of its actions after passes: {counts}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStage:
    """A stage behind the passes that rewrite it, and before those that generate code."""

    rewritten: RewrittenStage
    passes: tuple[tuple[GraphKind, PassManagerReport], ...]
    """What they did, by kind of graph."""

    stamping: CaptureLayersReport | None = None
    """How layers were stamped, or why not; None if that was not asked for, or not done here."""

    is_loaded: bool = False
    """Whether it was captured by another rank or run, and stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStage:
    """The graphs of a stage, stored as alike stages have them; see ``StorableGraph``."""

    trace: Callable[[], CapturedStage]
    model: nn.Module
    """The part of the model that is the stage."""

    names: StageNames
    axes: MeshAxes
    clock: StartupClock
    fake_mode: Any
    """Of the other stages of this rank, whose graphs may overlap with this one's; None: a new one.
    """

    kind = "pipeline stage"

    def capture(self) -> CapturedStage:
        """See ``StorableGraph``."""
        return self.trace()

    def encode(self, captured: CapturedStage) -> StoredGraph:
        """See ``StorableGraph``."""
        encoded = encode_stage(captured.rewritten, self.axes)
        reports = [[kind, pass_report_as_data(report)] for kind, report in captured.passes]
        return StoredGraph(
            step=self.names.without(encoded.document),
            documents={_PASSES: reports},
            blobs=encoded.blobs,
        )

    def decode(self, container: Container) -> CapturedStage:
        """See ``StorableGraph``."""
        with self.clock.part("load"):
            rewritten = decode_stage(
                self.names.restored(container.document(STEP_SECTION)),
                self.axes,
                blob=container.blob,
                fake_mode=self.fake_mode,
            )
            StageState(rewritten.graphs.capture, self.model)
            return CapturedStage(
                rewritten=rewritten,
                passes=_reports(container.document(_PASSES)),
                is_loaded=True,
            )

    def verified(self, captured: CapturedStage) -> CapturedStage:
        """See ``StorableGraph``: ``decode`` verifies, since what is cut follows from the whole."""
        return captured


@dataclass(frozen=True, slots=True, kw_only=True)
class StageToStore:
    """A stage whose graph can be stored, and what the graph depends on."""

    graph: StoredStage
    identified_by: Mapping[str, Any]
    """Arguments of ``RunArtifacts.identity``."""


def _reports(document: Any) -> tuple[tuple[GraphKind, PassManagerReport], ...]:
    if not isinstance(document, list) or not all(
        isinstance(each, list) and len(each) == 2 and each[0] in _KINDS for each in document
    ):
        raise ArtifactError("reports of a stage's passes are pairs of a kind of graph and a report")
    return tuple((kind, pass_report_from_data(data)) for kind, data in document)


_KINDS = frozenset(get_args(GraphKind))
