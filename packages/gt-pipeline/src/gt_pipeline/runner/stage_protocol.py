"""What `GraphPPRunner` asks of a pipeline stage.

The runner knows schedules, transfers and failure; a stage knows how to compute. They meet here, so
that the runner needs no graph: `gt_pipeline.graph.GraphPipelineStage` is one implementation, and a
stage that uses autograd, as in this package's tests, is another.

Tensors that pass between stages are plain (never DTensor: a stage unwraps to local tensors) and
contiguous; the runner makes them so before it hands them on. They have the shapes and dtypes that
the signatures state, for every microbatch alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from gt_config.node_keys import OverlappedBackward

Tensors: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSignature:
    """One tensor that enters or leaves a stage, for one microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    """Whether a gradient of the same shape and dtype travels the other way in backward."""

    repeats: int | None = None
    """Position of the activation that is the same tensor, if a stage returns one twice. Both
    travel. The gradient is that of the first: the stage after uses the first in place of both."""

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        text = f"{dtype}{list(self.shape)}{'' if self.requires_grad else ' without gradient'}"
        return text if self.repeats is None else f"{text}, the same tensor as {self.repeats}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchInputs:
    """One microbatch of what the caller gave to `step` or `eval`.

    A stage takes what concerns it: the first stage `args`, every stage the `kwargs` that its
    module's forward accepts, the last stage `target`.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None


@runtime_checkable
class PipelineStageGraphs(Protocol):
    """One pipeline stage on one rank. Every method is called from one thread.

    For a microbatch of a training step the runner calls `forward`, then either `full_backward`, or
    `backward_input` followed, at once or later, by `backward_weight`; `overlap` stands for one
    forward and one backward. Whenever one of these is called, or `evaluate`, parameters are
    gathered: `unshard` was called, and `reshard` not since. A step may call both several times.
    `reduce_gradients` is called once, behind the stage's last backward, and when the rank's list is
    done `gradients`, then `discard`. A step that fails calls `discard` at any point.

    So that communication runs behind computation, `unshard` and `reduce_gradients` need only launch
    it: what uses the parameters waits for them, and `gradients` for the reduction. Other stages
    compute in between.

    The order of microbatches in backward calls is the schedule's, and a stage accumulates in the
    order of calls: this is what makes a pipeline's gradients reproducible to the bit.

    Tensors that a stage is given (`activations`, `output_gradients`) are its to keep as long as it
    needs, and not to write into. Tensors that it returns are not written by it afterwards.
    """

    @property
    def stage_index(self) -> int:
        """Position in the model, 0 for the first stage."""

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline, over all ranks."""

    @property
    def device(self) -> torch.device:
        """Where activations are received."""

    @property
    def input_signature(self) -> tuple[ActivationSignature, ...]:
        """Activations from the stage before; empty for the first stage."""

    @property
    def output_signature(self) -> tuple[ActivationSignature, ...]:
        """Activations for the stage after.

        Those of the last stage: the loss, of shape (), then whatever else is returned to the caller
        (and receives no gradient).
        """

    @property
    def num_saved(self) -> int:
        """Microbatches of which values are kept for a backward, from `forward` to its last part."""

    def unshard(self) -> None:
        """Gather the parameters, or launch it. The stage keeps them until `reshard`."""

    def reshard(self) -> None:
        """Free the gathered parameters. Values saved for backward must not need them."""

    def forward(self, microbatch: int, activations: Tensors, inputs: MicrobatchInputs) -> Tensors:
        """Compute one microbatch and keep, under its number, what its backward needs.

        Args:
            microbatch: its number.
            activations: as `input_signature`.
            inputs: of this microbatch.

        Returns:
            As `output_signature`.
        """

    def full_backward(self, microbatch: int, output_gradients: Tensors) -> Tensors:
        """Add one microbatch's parameter gradients to the stage's own accumulators.

        Args:
            microbatch: its number.
            output_gradients: one for each output that requires a gradient, in order. To the last
                stage the runner gives the gradient of the loss, of shape ().

        Returns:
            One gradient for each input that requires one, in order.
        """

    def backward_input(self, microbatch: int, output_gradients: Tensors) -> Tensors:
        """The part of `full_backward` that the stage before waits for."""

    def backward_weight(self, microbatch: int) -> None:
        """The rest of `full_backward`: accumulate what `backward_input` has not."""

    def overlap(
        self,
        microbatch: int,
        activations: Tensors,
        inputs: MicrobatchInputs,
        *,
        backward_stage: PipelineStageGraphs,
        backward_kind: OverlappedBackward,
        backward_microbatch: int,
        output_gradients: Tensors,
    ) -> tuple[Tensors, Tensors]:
        """This stage's `forward` and a local stage's backward, interleaved.

        Has the effects of `self.forward(microbatch, activations, inputs)` and of the backward
        method that `backward_kind` names, on `backward_stage`, which may be this stage.

        Returns:
            What the forward returns, and what the backward returns.
        """

    def reduce_gradients(self) -> None:
        """Reduce the accumulators over data-parallel ranks, once, or launch it."""

    def evaluate(self, microbatch: int, activations: Tensors, inputs: MicrobatchInputs) -> Tensors:
        """As `forward`, with nothing kept for a backward."""

    def parameters(self) -> Mapping[str, Tensor]:
        """Parameters by their name in the unsplit model, whose `grad` a step adds to."""

    def gradients(self) -> Mapping[str, Tensor]:
        """Gradients of the step so far, reduced, by names out of `parameters`.

        Each has its parameter's type and layout (a DTensor for a DTensor), and storage that
        neither another gradient nor the stage uses later. A parameter without gradient is missing.
        """

    def discard(self) -> None:
        """Drop accumulators, saved values and gathered parameters: the stage is as before a step.

        Called after every step, failed or not, and harmless when nothing is held.
        """


@runtime_checkable
class NamesKwargs(Protocol):
    """A stage that knows which keyword arguments it can take.

    If all stages of a pipeline do, its runner refuses one that none of them takes: a mistyped name
    would be ignored otherwise, as each stage leaves to the others what is not its own.
    """

    @property
    def known_kwargs(self) -> frozenset[str] | None:
        """Their names; None if any name will do."""


@runtime_checkable
class KnowsUnshardedBytes(PipelineStageGraphs, Protocol):
    """A stage that knows how much memory its gathered parameters take."""

    @property
    def unsharded_bytes(self) -> int:
        """What `unshard` adds to the memory of this rank, in bytes."""


@runtime_checkable
class ReducesInParts(PipelineStageGraphs, Protocol):
    """A stage some of whose reductions need the result of an earlier one.

    `reduce_gradients` launches what needs none. A runner lets the rest go on between later
    computations, at the same places on all ranks that hold the stage.
    """

    @property
    def num_reduction_parts(self) -> int:
        """The launch, and one more for each wait that stands between two reductions or at the end.

        1 where nothing is reduced, 2 for a reduction over one mesh axis, 3 for shards and replicas.
        """

    def continue_reduction(self) -> None:
        """Wait for the reductions under way, and launch what needed them; at any time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedStep:
    """What the actions of one rank have computed in a training step."""

    gradients: Sequence[tuple[Tensor, Tensor]]
    """Every parameter that has a gradient, with it."""

    results: tuple[Tensors, ...]
    """What the last stage returned, by microbatch; empty on other ranks."""


class StepReplayer(Protocol):
    """Replays the training steps of a rank as a whole."""

    def run(
        self, microbatches: Sequence[MicrobatchInputs], compute: Callable[[], ComputedStep]
    ) -> ComputedStep | None:
        """What a step computes, recorded now or before; None if it has to run as it is.

        Args:
            microbatches: of the step.
            compute: runs all actions of the step, and waits for all transfers.
        """

    def release(self) -> None:
        """Drop what keeps process groups alive."""


@runtime_checkable
class ReplaysSteps(PipelineStageGraphs, Protocol):
    """A stage that knows whether all that it runs in a step can be recorded at once."""

    def step_replayer(self, stages: Mapping[int, PipelineStageGraphs]) -> StepReplayer | None:
        """What replays whole steps; None if something cannot be recorded.

        Asked when what the schedule pairs is ready. The stages then record nothing themselves.

        Args:
            stages: all of the rank, this one among them, by index.
        """


@runtime_checkable
class RecordsActions(PipelineStageGraphs, Protocol):
    """A stage whose actions may be recorded one by one."""

    @property
    def records_actions(self) -> bool:
        """Whether any is to be: gathered parameters keep their memory from then on."""

    def release_recordings(self) -> None:
        """Drop recordings, which keep process groups alive; the next actions may record anew."""


@runtime_checkable
class CapturedStageGraphs(PipelineStageGraphs, Protocol):
    """A stage that knows before the first step what it will run, down to its collectives.

    A runner asks it, and compares ranks that hold the same stage: if one of them ran another
    sequence of collectives, all would hang.
    """

    def prepare_overlap(self, backward_stage: Any, backward_kind: OverlappedBackward) -> object:
        """Make ready what `overlap` with that stage will run."""

    def prepare_evaluation(self) -> None:
        """Make ready what `evaluate` will run in the present mode of the module."""

    def collectives(self) -> Mapping[str, Sequence[str]]:
        """The collectives of all that is ready, in the order in which they are launched.

        Returns:
            A line for each collective, the same on every rank that meets there, by the action, or
            pair of actions, that launches it.
        """
