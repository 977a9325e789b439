"""Mode ``aot_joint``: a model's forward as two captured graphs, inside torchtitan's autograd loop.

What is captured is the model as it is called: forward and backward of everything up to its output.
The loss stays outside, and with the chunked loss the output projection too, since the loss applies
it piece by piece (``models/chunked_loss.py``). torchtitan calls both, and ``loss.backward()``, as
it does without capture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import GraphModule

from gt_config import JointPartitioner, ShapeChangePolicy
from gt_passes import PassContext, PassManagerReport
from gt_passes.verifier.collective_exchange import exchange_collective_digest
from gt_trace import ForwardBackward, export_joint_graph, partition
from gt_trace.joint.bound_joint import BoundJoint
from gt_trainer.metrics.startup import StartupClock
from gt_trainer.models.expert_regions import annotate_expert_regions
from gt_trainer.steps.captured_step import Recipe
from gt_trainer.steps.per_shape import PerShape


@dataclass(frozen=True, slots=True, kw_only=True)
class JointCaptureReport:
    """What a capture produced, for the log."""

    parts: ForwardBackward
    forward_passes: PassManagerReport
    backward_passes: PassManagerReport

    @property
    def pass_reports(self) -> tuple[PassManagerReport, ...]:
        """What passes did, for each graph."""
        return (self.forward_passes, self.backward_passes)

    @property
    def graph_modules(self) -> tuple[GraphModule, ...]:
        """The graphs that run, after passes."""
        return (self.parts.forward, self.parts.backward)

    @property
    def num_nodes_forward(self) -> int:
        """Operators in the forward graph that runs."""
        return _num_operators(self.parts.forward)

    @property
    def num_nodes_backward(self) -> int:
        """Operators in the backward graph that runs."""
        return _num_operators(self.parts.backward)


def capture_joint(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    partitioner: JointPartitioner,
    recipe: Recipe,
    clock: StartupClock,
) -> JointCaptureReport:
    """Export the joint graph of a call of ``model``, cut it, and run the passes on both parts.

    Args:
        model: parallelized, on its device or on meta.
        args: example arguments.
        kwargs: likewise.
        partitioner: how the joint graph is cut.
        recipe: builds the passes, once for each part.
        clock: counts capture and passes as parts of the start-up.
    """
    with clock.part("capture"), annotate_expert_regions(model):
        joint = export_joint_graph(model, args, kwargs)
        parts = partition(joint, partitioner=partitioner)
    with clock.part("passes"):
        forward = PassContext(
            fake_mode=joint.fake_mode, static_input_names=parts.static_input_names
        )
        backward = PassContext(fake_mode=joint.fake_mode)
        return JointCaptureReport(
            parts=parts,
            forward_passes=recipe(forward, "JOINT_FORWARD").run(parts.forward),
            backward_passes=recipe(backward, "JOINT_BACKWARD").run(parts.backward),
        )


class JointForward:
    """The forward of ``model`` as captured graphs; captures itself on first use.

    Before the first run, the ranks make sure that their graphs have the same collectives.

    Args:
        model: parallelized, on its device, in training mode.
        partitioner: how the joint graph is cut.
        recipe: builds the passes.
        on_shape_change: "error" lets the mismatch of a changed input through; "recapture" makes
            other graphs for the new shapes and keeps both.
        clock: counts capture and passes as parts of the start-up.
        on_capture: called after each capture, before the graphs first run.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        partitioner: JointPartitioner,
        recipe: Recipe,
        on_shape_change: ShapeChangePolicy,
        clock: StartupClock,
        on_capture: Callable[[JointCaptureReport], None],
    ) -> None:
        self._model = model
        self._partitioner = partitioner
        self._recipe = recipe
        self._clock = clock
        self._on_capture = on_capture
        self._num_captures = 0
        self._calls = PerShape(self._capture, policy=on_shape_change)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward graph on the model's arguments; the outputs carry autograd's history.

        Raises:
            InputMismatchError: an input differs from the captured one and the policy is "error".
        """
        return self._calls(*args, **kwargs)

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundJoint:
        report = capture_joint(
            self._model,
            args,
            kwargs,
            partitioner=self._partitioner,
            recipe=self._recipe,
            clock=self._clock,
        )
        self._on_capture(report)
        if self._num_captures == 0:
            # Only then: later, ranks with other shapes may capture at other times.
            for graph_module in report.graph_modules:
                exchange_collective_digest(graph_module)
        self._num_captures += 1
        return report.parts.bind(self._model)


def _num_operators(graph_module: GraphModule) -> int:
    nodes = graph_module.graph.nodes
    return sum(node.op not in ("placeholder", "get_attr", "output") for node in nodes)
