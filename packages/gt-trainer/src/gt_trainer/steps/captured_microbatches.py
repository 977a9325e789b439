"""The capture of a step whose microbatches gather and reduce once: made here, or stored and loaded.

A step is captured as ever, forward, loss and backward of one microbatch, and cut in up to three
graphs, on which passes run (``gt_pipeline.graph.cut_accumulation``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from gt_config import CaptureLayers, EpOverlapConfig
from gt_passes import (
    PassContext,
    PassManagerReport,
    estimate_memory,
    pass_report_as_data,
    pass_report_from_data,
    residency_table,
)
from gt_pipeline.graph import (
    AccumulationGraphs,
    cut_accumulation,
    decode_accumulation,
    encode_accumulation,
)
from gt_trace import InputPreparer
from gt_trace.artifacts.container import Container
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.capture.bound_inputs import BoundInputs
from gt_trace.errors import ArtifactError
from gt_trainer.artifacts.storable_graph import STEP_SECTION, StoredGraph
from gt_trainer.startup import StartupClock
from gt_trainer.steps.captured_step import Recipe, trace_training_step
from gt_trainer.steps.layer_tracer import CaptureLayersReport
from gt_trainer.steps.training_step import LossFunction, num_operators

_PASSES = "passes"


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationReport:
    """What a capture produced, for the log."""

    graphs: AccumulationGraphs
    passes: tuple[PassManagerReport, ...]
    """What they did, on each graph."""

    stamping: CaptureLayersReport | None = None
    """How layers were stamped, or why not; None if that was not asked for, or not done here."""

    is_loaded: bool = False
    """Whether the graphs were captured by another rank or run, and stored."""

    @property
    def graph_modules(self) -> tuple[GraphModule, ...]:
        """The graphs that run, after passes."""
        return tuple(each.graph_module for each in self.graphs.graphs)

    @property
    def num_nodes_captured(self) -> int:
        """Operators of the step as captured."""
        return num_operators(self.graphs.traced.graph_module)

    @property
    def num_nodes(self) -> int:
        """Operators of one microbatch as it runs, where graphs differ the most."""
        return max(map(num_operators, self.graph_modules))

    def __str__(self) -> str:
        """One line: the operators of each microbatch."""
        verb = "Loaded" if self.is_loaded else "Captured"
        counts = ", ".join(
            f"{each.role} {num_operators(each.graph_module):,}" for each in self.graphs.graphs
        )
        return (
            f"{verb} the microbatches of a training step, {self.graphs.num_microbatches} of "
            f"them; operators after {len(self.passes[0].records)} passes: {counts}"
        )

    def memory_text(self) -> str:
        """What is kept for the backward, and the estimated memory, as tables; the last has most."""
        last = self.graphs.last
        memory = estimate_memory(
            last.graph_module,
            num_static_inputs=self.graphs.traced.num_static_inputs,
            released_inputs=last.released_inputs,
            input_kinds=last.input_kinds,
        )
        table = residency_table(last.graph_module)
        return f"Kept for the backward:\n{table}\nEstimated memory:\n{memory}"


def capture_accumulation(
    model: nn.Module,
    loss_fn: LossFunction,
    *args: Any,
    num_microbatches: int,
    recipe: Recipe,
    clock: StartupClock,
    ep_overlap: EpOverlapConfig | None = None,
    capture_layers: CaptureLayers = "auto",
    meta_device: torch.device | str = "meta",
    verify: bool = True,
    until_code: bool = False,
    input_preparers: Sequence[InputPreparer] = (),
) -> AccumulationReport:
    """Capture one microbatch, cut it for all of a step, and run the passes on every graph.

    Args:
        model: as for ``capture_training_step``; so are those that are not told here.
        loss_fn: see ``model``.
        args: see ``model``.
        num_microbatches: of a step, two or more.
        recipe: see ``model``.
        clock: see ``model``.
        ep_overlap: see ``model``.
        capture_layers: see ``model``.
        meta_device: see ``model``.
        verify: whether to verify the graphs as cut.
        until_code: whether to leave out the passes that generate code, and those behind them.
        input_preparers: see ``model``.

    Raises:
        StageCutError: what is gathered or reduced cannot be shared.
        ForwardChunkingError, ChunkMetadataError: as ``capture_training_step``.
    """
    with clock.part("capture"):
        traced, stamping = trace_training_step(
            model,
            loss_fn,
            *args,
            ep_overlap=ep_overlap,
            capture_layers=capture_layers,
            meta_device=meta_device,
            input_preparers=input_preparers,
        )
    with clock.part("passes"):
        graphs = cut_accumulation(
            traced, num_results=1, num_microbatches=num_microbatches, verify=verify
        )
        reports = []
        for context, each in zip(contexts_of(graphs), graphs.graphs, strict=True):
            manager = recipe(context, "MICROBATCH")
            run = manager.run_before_code if until_code else manager.run
            reports.append(run(each.graph_module))
    return AccumulationReport(graphs=graphs, passes=tuple(reports), stamping=stamping)


def contexts_of(graphs: AccumulationGraphs) -> list[PassContext]:
    """What passes need to know of each graph."""
    return [
        PassContext(fake_mode=graphs.traced.fake_mode, static_input_names=each.static_input_names)
        for each in graphs.graphs
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAccumulation:
    """The graphs of a step's microbatches behind their passes; see ``StorableGraph``."""

    trace: Callable[[], AccumulationReport]
    """Captures, cuts, and runs the passes that generate no code."""

    model: nn.Module
    axes: MeshAxes
    clock: StartupClock
    kind = "microbatches of a training step"

    def capture(self) -> AccumulationReport:
        """See ``StorableGraph``."""
        return self.trace()

    def encode(self, captured: AccumulationReport) -> StoredGraph:
        """See ``StorableGraph``."""
        encoded = encode_accumulation(captured.graphs, self.axes)
        return StoredGraph(
            step=encoded.document,
            documents={_PASSES: [pass_report_as_data(each) for each in captured.passes]},
            blobs=encoded.blobs,
        )

    def decode(self, container: Container) -> AccumulationReport:
        """See ``StorableGraph``."""
        with self.clock.part("load"):
            document = container.document(STEP_SECTION)
            graphs = decode_accumulation(document, self.axes, blob=container.blob)
            BoundInputs(graphs.traced, self.model)
            reports = container.document(_PASSES)
            if not isinstance(reports, list) or len(reports) != len(graphs.graphs):
                raise ArtifactError("each graph of a microbatch has one report of passes")
            return AccumulationReport(
                graphs=graphs, passes=tuple(map(pass_report_from_data, reports)), is_loaded=True
            )

    def verified(self, captured: AccumulationReport) -> AccumulationReport:
        """See ``StorableGraph``: ``decode`` verifies, since what is cut follows from the whole."""
        return captured
