"""The protocol of a training step: what the trainer asks of each form of it, and nothing else.

A step is eager (``EagerStep``, torchtitan's own), pipelined (``PipelinedStep``), or a captured
program (``ProgramStep``): one graph, microbatches with one reduction, or a joint graph.
``new_training_step`` chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from gt_passes import PassManagerReport

LossFunction = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""torchtitan's: (prediction, labels, global_valid_tokens, **inputs) -> (loss, metrics)."""

Batch = dict[str, torch.Tensor]
"""torchtitan's: "input" (B, L) token ids and "positions" (B, L)."""

ForwardBackward = Callable[..., torch.Tensor]
"""torchtitan's ``forward_backward_step``; its arguments are those of ``TrainingStep.run``."""


class StepReport(Protocol):
    """What one capture produced. ``str(report)`` is a line for the log."""

    @property
    def passes(self) -> tuple[PassManagerReport, ...]:
        """Reports of passes, one for each graph that they ran on."""

    @property
    def graph_modules(self) -> tuple[GraphModule, ...]:
        """The graphs that run, after passes."""

    def memory_text(self) -> str | None:
        """What is kept for the backward, and the estimated memory; None where no graph has both."""


class TrainingStep(Protocol):
    """Forward, loss and backward of one batch; gradients are added to ``param.grad``."""

    @property
    def runs_whole_steps(self) -> bool:
        """Whether a run takes all batches of a step, where gradients are accumulated."""

    @property
    def is_captured(self) -> bool:
        """Whether graphs run, captured when they are first needed."""

    @property
    def reports(self) -> tuple[StepReport, ...]:
        """One for each capture so far, oldest first."""

    def run(
        self,
        *,
        input_dict: Batch | list[Batch],
        labels: torch.Tensor | list[torch.Tensor],
        global_valid_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Run one batch.

        Args:
            input_dict: this rank's batch; with a pipeline, or where whole steps are run, one for
                each microbatch.
            labels: (B, L) token ids; likewise.
            global_valid_tokens: scalar, tokens of the whole step over all ranks.

        Returns:
            This rank's share of the mean loss, a scalar.
        """

    def close(self) -> None:
        """Give back what holds on to process groups and threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPreparation:
    """What torchtitan does around a model for one batch."""

    split: Callable[[Batch, torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]
    """``post_dataloading_process``: tokens (B, L), labels (B, L), and what else the model takes."""

    context: Callable[[], AbstractContextManager[None]]
    """``train_context``, in which forward and backward run."""


class EagerStep:
    """The step that torchtitan runs: a model, or a schedule of eager stages.

    Args:
        run: torchtitan's ``forward_backward_step``.
    """

    is_captured = False
    runs_whole_steps = False
    reports: tuple[StepReport, ...] = ()

    def __init__(self, run: ForwardBackward) -> None:
        self.run = run

    def close(self) -> None:
        """Nothing is held."""


def loss_of_batch(
    loss_fn: LossFunction,
    prediction: Any,
    labels: torch.Tensor,
    global_valid_tokens: torch.Tensor,
    extra_kwargs: dict[str, Any],
) -> torch.Tensor:
    """The loss as torchtitan's trainer asks for it: of the model's inputs it takes positions."""
    loss_inputs = {k: v for k, v in extra_kwargs.items() if k == "positions"}
    loss, _ = loss_fn(prediction, labels, global_valid_tokens, **loss_inputs)
    return loss


def num_operators(graph_module: GraphModule) -> int:
    """Number of nodes that compute: neither inputs, attributes nor the output."""
    nodes = graph_module.graph.nodes
    return sum(node.op not in ("placeholder", "get_attr", "output") for node in nodes)
