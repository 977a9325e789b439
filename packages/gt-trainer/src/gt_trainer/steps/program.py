"""A captured program: graphs of a training step, the passes on them, and how they are stored.

A whole step, microbatches that reduce once, a model whose loss stays outside, and a pipeline stage
are programs. What all have in common is here: capture behind passes, the report of it, and the
stored graphs. A graph is stored behind the passes that rewrite it and before those that generate
code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn
from torch.fx import GraphModule, Node

from gt_config import CaptureLayers, CompileConfig, EpOverlapConfig, JointPartitioner
from gt_config.graph_kinds import GraphKind
from gt_passes import (
    PassContext,
    PassManager,
    PassManagerReport,
    estimate_memory,
    pass_report_as_data,
    pass_report_from_data,
    residency_table,
)
from gt_passes.analysis.liveness import MemoryKind
from gt_trace import InputPreparer
from gt_trace.artifacts.container import Container
from gt_trace.artifacts.encoded_document import DocumentForm
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.errors import ArtifactError
from gt_trainer.artifacts.stage_names import StageNames
from gt_trainer.artifacts.storable_graph import STEP_SECTION, StoredGraph
from gt_trainer.startup import StartupClock
from gt_trainer.steps.layer_tracer import CaptureLayersReport
from gt_trainer.steps.recipe import Recipe
from gt_trainer.steps.training_step import num_operators

_PASSES = "passes"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramGraph:
    """A graph of a program, and what passes need to know of it."""

    graph_module: GraphModule
    kind: GraphKind
    context: PassContext
    released_inputs: Sequence[Node] = ()
    """Placeholders that only the graph holds, as for ``estimate_memory``."""

    input_kinds: Mapping[Node, MemoryKind] = field(default_factory=dict)
    """Why placeholders are held that are neither state nor arguments."""

    is_repeated: bool = True
    """Whether it runs for every microbatch that no other graph is for."""


CapturedT = TypeVar("CapturedT")


@dataclass(frozen=True, slots=True)
class Program(ABC, Generic[CapturedT]):
    """The graphs of one form of training step."""

    form: ClassVar[DocumentForm[Any]]
    """The form in which its graphs are stored."""

    graph_kinds: ClassVar[tuple[GraphKind, ...]]
    """The kinds of graphs on which passes run, each once."""

    kinds_before_cut: ClassVar[tuple[GraphKind, ...]] = ()
    """The kinds among these that are cut when their passes have run, and are not in ``graphs``."""

    decoding_verifies: ClassVar[bool] = False
    """Whether the graphs of a document are verified, since what is cut follows from the whole."""

    captured: CapturedT
    """The captured graphs, and what they take and give."""

    @property
    @abstractmethod
    def graphs(self) -> tuple[ProgramGraph, ...]:
        """The graphs that run, in their order."""

    @property
    @abstractmethod
    def num_nodes_captured(self) -> int:
        """Operators as captured, where no passes have counted them."""

    @abstractmethod
    def text(self, report: CaptureReport[Any]) -> str:
        """Describe the program in a line of the log, after "Captured "."""

    def memory_text(self) -> str | None:
        """Tables of values kept for the backward and of memory; None where no graph has both.

        They are those of the last graph, which needs the most memory.
        """
        last = self.graphs[-1]
        if last.kind not in ("STEP", "MICROBATCH"):
            return None
        memory = estimate_memory(
            last.graph_module,
            num_static_inputs=last.context.num_static_inputs,
            released_inputs=last.released_inputs,
            input_kinds=last.input_kinds,
        )
        table = residency_table(last.graph_module)
        return f"Kept for the backward:\n{table}\nEstimated memory:\n{memory}"

    @abstractmethod
    def check_fits(self, model: nn.Module) -> None:
        """Check that the graphs are for a module.

        Raises:
            StateMismatchError: they are for another one.
        """


ProgramT = TypeVar("ProgramT", bound=Program[Any])

RunPasses = Callable[[ProgramGraph], None]
"""Runs the passes of a recipe on a graph, and keeps what they report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingOptions:
    """How a program is traced."""

    ep_overlap: EpOverlapConfig = field(default_factory=EpOverlapConfig)
    """Options of modules that run in chunks, if the strategy is eager."""

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
    trace: Callable[[RunPasses], tuple[ProgramT, CaptureLayersReport | None]]
    """Captures the program, and runs the passes on graphs that it cuts. Returns the program, and
    the report on stamped layers if layers were to be stamped."""

    model: nn.Module
    identified_by: Mapping[str, Any]
    """``loss_fn``, ``arguments`` and perhaps ``num_microbatches`` of ``step_identity``."""

    stage: StageNames | None = None
    """The names of the pipeline stage that the model is; None without a pipeline."""

    fake_mode: Any = None
    """The fake mode of graphs that may overlap with this program's; None: a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport(Generic[ProgramT]):
    """The program that a capture produced. ``str`` gives a line for the log."""

    program: ProgramT
    passes: tuple[PassManagerReport, ...]
    """Reports of the passes on each graph; first those on graphs that were cut afterwards."""

    stamping: CaptureLayersReport | None = None
    """How layers were stamped, or why not; None if that was not asked for, or not done here."""

    is_loaded: bool = False
    """Whether the graphs were captured by another rank or run, and stored."""

    managers: tuple[PassManager, ...] = ()
    """Managers that still have to run the passes that generate code, by graph. Empty if all passes
    have run, or if they ran in another process."""

    def __str__(self) -> str:
        """One line: the operators that run, and the passes that made them."""
        verb = "Loaded" if self.is_loaded else "Captured"
        return f"{verb} {self.program.text(self)}"

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
        """Tables of values kept for the backward and of memory; None where no graph has both."""
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
    passes: list[PassManagerReport] = []
    managers: list[PassManager] = []

    def run_passes(each: ProgramGraph) -> None:
        manager = recipe(each.context, each.kind)
        is_cut = each.kind in asked.program.kinds_before_cut
        run = manager.run_before_code if until_code and not is_cut else manager.run
        passes.append(run(each.graph_module))
        managers.append(manager)

    with clock.part("capture"):
        program, stamping = asked.trace(run_passes)
    num_before_cut = len(passes)
    with clock.part("passes"):
        for each in program.graphs:
            run_passes(each)
    return CaptureReport(
        program=program,
        passes=tuple(passes),
        stamping=stamping,
        managers=tuple(managers[num_before_cut:]) if until_code else (),
    )


def generate_code(report: CaptureReport[ProgramT], recipe: Recipe) -> CaptureReport[ProgramT]:
    """Run the passes that ``until_code`` left out, on verified graphs.

    Args:
        report: The capture.
        recipe: As it was for the capture.
    """
    graphs = report.program.graphs
    num_before_cut = len(report.passes) - len(graphs)
    managers = report.managers or [recipe(each.context, each.kind) for each in graphs]
    passes = [
        manager.run_from_code(each.graph_module, earlier=earlier, is_verified=True)
        for each, manager, earlier in zip(
            graphs, managers, report.passes[num_before_cut:], strict=True
        )
    ]
    return replace(report, passes=(*report.passes[:num_before_cut], *passes), managers=())


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
        return self.asked.program.form.name

    @property
    def identified_by(self) -> Mapping[str, Any]:
        """See ``StorableGraph``."""
        asked = self.asked
        kinds = asked.program.graph_kinds
        return {
            **asked.identified_by,
            "passes": [each for kind in kinds for each in self.recipe.passes(kind)],
            "model": asked.model,
            "stage": asked.stage,
        }

    def capture(self) -> CaptureReport[ProgramT]:
        """See ``StorableGraph``."""
        return capture_program(self.asked, recipe=self.recipe, clock=self.clock, until_code=True)

    def encode(self, captured: CaptureReport[ProgramT]) -> StoredGraph:
        """See ``StorableGraph``."""
        program, stage = captured.program, self.asked.stage
        encoded = program.form.encode(program.captured, self.axes)
        reports = [pass_report_as_data(each) for each in captured.passes]
        return StoredGraph(
            step=encoded.document if stage is None else stage.without(encoded.document),
            documents=MappingProxyType({_PASSES: reports}),
            blobs=encoded.blobs,
        )

    def decode(self, container: Container) -> CaptureReport[ProgramT]:
        """See ``StorableGraph``."""
        with self.clock.part("load"):
            asked, document = self.asked, container.document(STEP_SECTION)
            graphs = asked.program.form.decode(
                document if asked.stage is None else asked.stage.restored(document),
                self.axes,
                blob=container.blob,
                fake_mode=asked.fake_mode,
            )
            program = asked.program(graphs)
            program.check_fits(asked.model)
            reports = container.document(_PASSES)
            num_reports = len(program.kinds_before_cut) + len(program.graphs)
            if not isinstance(reports, list) or len(reports) != num_reports:
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
