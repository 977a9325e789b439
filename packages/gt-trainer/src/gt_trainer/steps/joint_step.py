"""Mode ``aot_joint``: a model's forward as two captured graphs, inside torchtitan's autograd loop.

What is captured is the model as it is called: forward and backward of everything up to its output.
The loss stays outside, and with the chunked loss the output projection too, since the loss applies
it piece by piece (``decoder/chunked_loss.py``). Both, and ``loss.backward()``, run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from gt_config import JointPartitioner, ShapeChangePolicy
from gt_passes import PassContext, PassManagerReport, release_cuda_graphs
from gt_passes.verifier.collective_exchange import exchange_collective_digest
from gt_trace.joint import ForwardBackward, export_joint_graph, partition
from gt_trace.joint.bound_joint import BoundJoint
from gt_trainer.decoder.expert_regions import annotate_expert_regions
from gt_trainer.startup import StartupClock
from gt_trainer.steps.captured_step import Recipe
from gt_trainer.steps.per_shape import PerShape
from gt_trainer.steps.training_step import (
    Batch,
    BatchPreparation,
    LossFunction,
    loss_of_batch,
    num_operators,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JointCaptureReport:
    """What a capture produced, for the log."""

    parts: ForwardBackward
    passes: tuple[PassManagerReport, PassManagerReport]
    """What they did to the forward graph and to the backward graph."""

    def __str__(self) -> str:
        """One line: the operators that run, and the passes that made them."""
        return (
            f"Captured the model: {self.num_nodes_forward:,} operators forward and "
            f"{self.num_nodes_backward:,} backward after {len(self.passes[0].records)} and "
            f"{len(self.passes[1].records)} passes"
        )

    def memory_text(self) -> None:
        """No graph has both the forward and the backward."""

    @property
    def graph_modules(self) -> tuple[GraphModule, ...]:
        """The graphs that run, after passes."""
        return (self.parts.forward, self.parts.backward)

    @property
    def num_nodes_forward(self) -> int:
        """Operators in the forward graph that runs."""
        return num_operators(self.parts.forward)

    @property
    def num_nodes_backward(self) -> int:
        """Operators in the backward graph that runs."""
        return num_operators(self.parts.backward)


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
            passes=(
                recipe(forward, "JOINT_FORWARD").run(parts.forward),
                recipe(backward, "JOINT_BACKWARD").run(parts.backward),
            ),
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
        self.reports: tuple[JointCaptureReport, ...] = ()
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
        if not self.reports:
            # Only then: later, ranks with other shapes may capture at other times.
            for graph_module in report.graph_modules:
                exchange_collective_digest(graph_module)
        self.reports = (*self.reports, report)
        return report.parts.bind(self._model)


class JointStep:
    """A captured forward, and a loss and its ``backward()`` that run eagerly.

    Args:
        forward: of the model.
        loss_fn: torchtitan's loss.
        preparation: what torchtitan does around the model for one batch.
    """

    is_captured = True
    runs_whole_steps = False

    def __init__(
        self, forward: JointForward, loss_fn: LossFunction, *, preparation: BatchPreparation
    ) -> None:
        self._forward = forward
        self._loss_fn = loss_fn
        self._preparation = preparation

    @property
    def reports(self) -> tuple[JointCaptureReport, ...]:
        """One for each capture so far, oldest first."""
        return self._forward.reports

    def run(
        self,
        *,
        input_dict: Batch | list[Batch],
        labels: torch.Tensor | list[torch.Tensor],
        global_valid_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """See ``TrainingStep``.

        Raises:
            InputMismatchError: an input differs from the captured one and the policy is "error".
        """
        assert isinstance(input_dict, dict)
        assert isinstance(labels, torch.Tensor)
        inputs, labels, extra_kwargs = self._preparation.split(input_dict, labels)
        with self._preparation.context():
            prediction = self._forward(inputs, **extra_kwargs)
            loss = loss_of_batch(
                self._loss_fn, prediction, labels, global_valid_tokens, extra_kwargs
            )
            del prediction  # the backward then frees it as soon as it can
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return loss

    def close(self) -> None:
        """Let go of recorded CUDA graphs."""
        for report in self.reports:
            for graph_module in report.graph_modules:
                release_cuda_graphs(graph_module)
