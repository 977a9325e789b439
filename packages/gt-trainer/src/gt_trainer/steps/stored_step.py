"""Captured training steps as graphs that are stored, for other ranks and for later starts.

A step is stored behind the passes that rewrite it and before those that generate code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from gt_passes import PassContext, PassManager, pass_report_as_data, pass_report_from_data
from gt_trace.artifacts.container import Container
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.artifacts.step_document import decode_step, encode_step
from gt_trainer.artifacts.storable_graph import STEP_SECTION, StoredGraph
from gt_trainer.startup import StartupClock
from gt_trainer.steps.captured_step import CaptureReport

_PASSES = "passes"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTrainingStep:
    """The graph of a step behind its passes; see ``StorableGraph``."""

    trace: Callable[[], CaptureReport]
    """Captures, and runs the passes that generate no code."""

    model: nn.Module
    axes: MeshAxes
    clock: StartupClock
    kind = "training step"

    def capture(self) -> CaptureReport:
        """See ``StorableGraph``."""
        return self.trace()

    def encode(self, captured: CaptureReport) -> StoredGraph:
        """See ``StorableGraph``."""
        encoded = encode_step(captured.traced, self.axes)
        return StoredGraph(
            step=encoded.document,
            documents={_PASSES: pass_report_as_data(captured.passes[0])},
            blobs=encoded.blobs,
        )

    def decode(self, container: Container) -> CaptureReport:
        """See ``StorableGraph``."""
        with self.clock.part("load"):
            stored = pass_report_from_data(container.document(_PASSES))
            traced = decode_step(container.document(STEP_SECTION), self.axes, blob=container.blob)
            traced.bind(self.model)
            return CaptureReport(traced=traced, passes=(stored,), is_loaded=True)

    def verified(self, captured: CaptureReport) -> CaptureReport:
        """See ``StorableGraph``."""
        with self.clock.part("load"):
            # No passes: the verifier, and recompilation.
            manager = PassManager((), context=PassContext.of_step(captured.traced))
            verification = manager.run(captured.traced.graph_module)
            return replace(captured, passes=(captured.passes[0].followed_by(verification),))
