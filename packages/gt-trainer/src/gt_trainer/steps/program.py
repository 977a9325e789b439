"""A captured program: graphs of a training step, the passes on them, and how they are stored.

A whole step, microbatches that reduce once, and a model whose loss stays outside are programs. What
all have in common is here: capture behind passes, the report of it, and the stored graphs. A graph
is stored behind the passes that rewrite it and before those that generate code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch
from torch import nn
from torch.fx import GraphModule

from gt_config import CaptureLayers, CompileConfig, EpOverlapConfig, JointPartitioner
from gt_config.graph_kinds import GraphKind
from gt_passes import (
    PassContext,
    PassManager,
    PassManagerReport,
    pass_report_as_data,
    pass_report_from_data,
)
from gt_trace import InputPreparer
from gt_trace.artifacts.container import Container
from gt_trace.artifacts.encoded_document import EncodedDocument
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.errors import ArtifactError
from gt_trainer.artifacts.storable_graph import STEP_SECTION, StoredGraph
from gt_trainer.startup import StartupClock
from gt_trainer.steps.layer_tracer import CaptureLayersReport
from gt_trainer.steps.training_step import num_operators

Recipe = Callable[[PassContext, GraphKind], PassManager]
"""Builds the passes for one captured graph, of the kind given."""

_PASSES = "passes"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramGraph:
    """A graph of a program, and what passes need to know of it."""

    graph_module: GraphModule
    kind: GraphKind
    context: PassContext


class Program(Protocol):
    """The graphs of one form of training step."""

    kind: ClassVar[str]
    """What a container of it says that it holds."""

    graph_kinds: ClassVar[tuple[GraphKind, ...]]
    """The kinds of its graphs, each once."""

    decoding_verifies: ClassVar[bool]
    """Whether ``decode`` verifies the graphs, since what is cut follows from the whole."""

    @property
    def graphs(self) -> tuple[ProgramGraph, ...]:
        """The graphs that run, in their order."""

    @property
    def num_nodes_captured(self) -> int:
        """Operators as captured, where no passes have counted them."""

    def text(self, passes: Sequence[PassManagerReport]) -> str:
        """Describe the program in a line of the log, after "Captured the "."""

    def memory_text(self) -> str | None:
        """What is kept for the backward, and the estimated memory; None where no graph has both."""

    def bind(self, model: nn.Module) -> Any:
        """Return what runs the graphs on the state of ``model``."""

    def check_fits(self, model: nn.Module) -> None:
        """Check that the graphs are for a module.

        Raises:
            StateMismatchError: they are for another one.
        """

    def encode(self, axes: MeshAxes) -> EncodedDocument:
        """Return the graphs as a document that alike ranks share.

        Raises:
            ArtifactError: something cannot be stored; it is named.
        """

    @classmethod
    def decode(cls, document: Any, axes: MeshAxes, *, blob: Callable[[str], bytes]) -> Self:
        """Return the program of a document.

        Raises:
            ArtifactError: the document is damaged, or names what there is not here.
        """


ProgramT = TypeVar("ProgramT", bound=Program)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingOptions:
    """How a program is traced."""

    ep_overlap: EpOverlapConfig = field(default_factory=EpOverlapConfig)
    """Which modules run in chunks, if the strategy is eager."""

    capture_layers: CaptureLayers = "auto"
    """Whether every layer is traced, or most are stamped."""

    meta_device: torch.device | str = "meta"
    """The device for which a model on meta is captured."""

    input_preparers: Sequence[InputPreparer] = ()
    """Hooks on the arguments: tokens, labels, number of tokens, what else the model takes."""

    verify: bool = True
    """Whether graphs are verified as they are cut."""

    joint_partitioner: JointPartitioner = "min_cut"
    """How a joint graph is cut."""


def tracing_options(
    options: CompileConfig,
    *,
    input_preparers: Sequence[InputPreparer] = (),
    meta_device: torch.device | str = "meta",
) -> TracingOptions:
    """Return how the programs of a run are traced."""
    return TracingOptions(
        ep_overlap=options.ep_overlap,
        capture_layers=options.capture_layers,
        meta_device=meta_device,
        input_preparers=input_preparers,
        verify=options.verify_passes,
        joint_partitioner=options.joint_partitioner,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramToCapture(Generic[ProgramT]):
    """A program that is not captured yet, and what it depends on."""

    program: type[ProgramT]
    trace: Callable[[], tuple[ProgramT, CaptureLayersReport | None]]
    """Captures it, and says how its layers were stamped if that was asked for."""

    model: nn.Module
    identified_by: Mapping[str, Any]
    """``loss_fn``, ``arguments`` and perhaps ``num_microbatches`` of ``RunArtifacts.identity``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport(Generic[ProgramT]):
    """What a capture produced. ``str`` gives a line for the log."""

    program: ProgramT
    passes: tuple[PassManagerReport, ...]
    """What passes did, on each graph."""

    stamping: CaptureLayersReport | None = None
    """How layers were stamped, or why not; None if that was not asked for, or not done here."""

    is_loaded: bool = False
    """Whether the graphs were captured by another rank or run, and stored."""

    def __str__(self) -> str:
        """One line: the operators that run, and the passes that made them."""
        verb = "Loaded" if self.is_loaded else "Captured"
        return f"{verb} the {self.program.text(self.passes)}"

    @property
    def graph_modules(self) -> tuple[GraphModule, ...]:
        """The graphs that run, after passes."""
        return tuple(each.graph_module for each in self.program.graphs)

    @property
    def num_nodes_captured(self) -> int:
        """Operators as captured, before passes."""
        records = self.passes[0].records
        whole = len(self.passes) == 1 and records
        return records[0].before.num_ops if whole else self.program.num_nodes_captured

    @property
    def num_nodes(self) -> int:
        """Operators that run, after passes; of several graphs, those of the largest."""
        return max(map(num_operators, self.graph_modules))

    def memory_text(self) -> str | None:
        """What is kept for the backward, and the estimated memory; None where no graph has both."""
        return self.program.memory_text()


def capture_program(
    asked: ProgramToCapture[ProgramT],
    *,
    recipe: Recipe,
    clock: StartupClock,
    until_code: bool = False,
) -> CaptureReport[ProgramT]:
    """Capture a program and run the passes on its graphs.

    Args:
        asked: The program.
        recipe: Builds the passes.
        clock: Counts capture and passes as parts of the start-up.
        until_code: Whether to leave out the passes that generate code, and those behind them.

    Raises:
        ForwardChunkingError: A module cannot run in chunks; the model is left as it was.
        ChunkMetadataError: A module that was to run in chunks was not called.
        StageCutError: What microbatches gather or reduce cannot be shared.
    """
    with clock.part("capture"):
        program, stamping = asked.trace()
    with clock.part("passes"):
        reports = []
        for each in program.graphs:
            manager = recipe(each.context, each.kind)
            run = manager.run_before_code if until_code else manager.run
            reports.append(run(each.graph_module))
    return CaptureReport(program=program, passes=tuple(reports), stamping=stamping)


def generate_code(report: CaptureReport[ProgramT], recipe: Recipe) -> CaptureReport[ProgramT]:
    """Run the passes that ``until_code`` left out, on verified graphs.

    Args:
        report: The capture.
        recipe: As it was for the capture.
    """
    passes = tuple(
        recipe(each.context, each.kind).run_from_code(
            each.graph_module, earlier=earlier, is_verified=True
        )
        for each, earlier in zip(report.program.graphs, report.passes, strict=True)
    )
    return replace(report, passes=passes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProgram(Generic[ProgramT]):
    """The graphs of a program behind their passes; see ``StorableGraph``."""

    asked: ProgramToCapture[ProgramT]
    recipe: Recipe
    axes: MeshAxes
    clock: StartupClock

    @property
    def kind(self) -> str:
        """See ``StorableGraph``."""
        return self.asked.program.kind

    def capture(self) -> CaptureReport[ProgramT]:
        """See ``StorableGraph``."""
        return capture_program(self.asked, recipe=self.recipe, clock=self.clock, until_code=True)

    def encode(self, captured: CaptureReport[ProgramT]) -> StoredGraph:
        """See ``StorableGraph``."""
        encoded = captured.program.encode(self.axes)
        reports = [pass_report_as_data(each) for each in captured.passes]
        return StoredGraph(
            step=encoded.document,
            documents=MappingProxyType({_PASSES: reports}),
            blobs=encoded.blobs,
        )

    def decode(self, container: Container) -> CaptureReport[ProgramT]:
        """See ``StorableGraph``."""
        with self.clock.part("load"):
            document = container.document(STEP_SECTION)
            program = self.asked.program.decode(document, self.axes, blob=container.blob)
            program.check_fits(self.asked.model)
            reports = container.document(_PASSES)
            if not isinstance(reports, list) or len(reports) != len(program.graphs):
                raise ArtifactError("each stored graph has one report of passes")
            passes = tuple(map(pass_report_from_data, reports))
            return CaptureReport(program=program, passes=passes, is_loaded=True)

    def verified(self, captured: CaptureReport[ProgramT]) -> CaptureReport[ProgramT]:
        """See ``StorableGraph``."""
        if self.asked.program.decoding_verifies:
            return captured
        with self.clock.part("load"):
            # No passes: the verifier, and recompilation.
            passes = tuple(
                earlier.followed_by(PassManager((), context=each.context).run(each.graph_module))
                for each, earlier in zip(captured.program.graphs, captured.passes, strict=True)
            )
            return replace(captured, passes=passes)
