"""A rank's whole step as one CUDA graph: its actions, and the transfers between them.

Where every graph of a rank's stages can be recorded, so can the list of its actions: gathers,
computations, sends and receives, reductions. The recording runs the list as any step does, in the
order of the schedule, so that memory is used again as it is there: nothing is kept for microbatches
in places (``recorded_actions``), and no gathered parameter is copied. Then a step is

1. its microbatches, copied to where the recording reads them, after the same checks as ever;
2. one launch;
3. gradients and losses, copied from where it leaves them: they outlive the next launch.

Parameters and buffers are read where they are (``step_recording``). Evaluations run as they are.

Why it is built so: docs/decisions/0025-recorded-and-offloading-stages.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from torch import Tensor

from gt_passes.cuda_graphs.whole_recording import WholeRecording
from gt_pipeline.graph.step_recording import StepRecording
from gt_pipeline.runner.stage_protocol import ComputedStep, MicrobatchInputs
from gt_trace import TensorLayout, flatten_tensor, unflatten_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReads:
    """What a stage reads in a recording, in place of its module's state and of microbatches."""

    state: Sequence[Tensor]
    inputs: Sequence[Sequence[Tensor]]
    """By microbatch, as its reader flattens them."""


class RecordableStage(Protocol):
    """What a recording asks of a stage."""

    reads: StageReads | None
    """Set while its actions are recorded."""

    def parameters(self) -> Mapping[str, Tensor]:
        """Parameters by name."""

    def state_tensors(self) -> Mapping[str, Tensor]:
        """Parameters and buffers where they are now, by name."""

    def plain_inputs(self, inputs: MicrobatchInputs) -> list[Tensor]:
        """What a forward reads of a microbatch besides activations."""

    def check_state(self) -> None:
        """Make sure that a step would run as it was captured."""

    def discard(self) -> None:
        """End the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """How the flat results of a recording make up what a step computed."""

    gradients: Sequence[tuple[int, str, TensorLayout]]
    """Stage and name of each parameter that has a gradient, and how that is made of plain tensors.
    Not the parameter: another may stand there by then, over the same memory."""

    num_results: Sequence[int]
    """What the last stage returned, by microbatch."""


class ReplayedSteps:
    """Records the training steps of a rank after they have run as they are, and replays them.

    Args:
        stages: of the rank, all graphs of which can be recorded.
        how: they are.
    """

    def __init__(self, stages: Mapping[int, RecordableStage], how: WholeRecording) -> None:
        self._stages = stages
        self._recording = StepRecording(how)
        self._form: _Form | None = None

    def run(
        self, microbatches: Sequence[MicrobatchInputs], compute: Callable[[], ComputedStep]
    ) -> ComputedStep | None:
        """What a step computes, in memory that later steps leave alone.

        None if it has to run as it is: to warm up, or since parameters lie elsewhere.

        Args:
            microbatches: of the step.
            compute: runs all its actions, and waits for all transfers.

        Raises:
            CudaGraphAddressError: parameters were replaced too often.
            StageInputError, gt_trace.StateMismatchError: as ``GraphPipelineStage.forward``.
        """
        stages = self._stages.values()
        states = {index: stage.state_tensors() for index, stage in self._stages.items()}
        given: list[list[list[Tensor]]] = []

        def read_inputs() -> list[Tensor]:
            given.extend([stage.plain_inputs(each) for each in microbatches] for stage in stages)
            for stage in stages:
                stage.check_state()
            return [tensor for of_stage in given for each in of_stage for tensor in each]

        def computed(state: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            state_left, inputs_left = iter(state), iter(inputs)
            for stage, of_state, of_stage in zip(stages, states.values(), given, strict=True):
                stage.reads = StageReads(
                    state=tuple(islice(state_left, len(of_state))),
                    inputs=tuple(tuple(islice(inputs_left, len(each))) for each in of_stage),
                )
            try:
                return self._flattened(compute())
            finally:
                for stage in stages:
                    stage.reads = None
                    stage.discard()

        state = {
            f"stage {index}, {name}": tensor
            for index, of_stage in states.items()
            for name, tensor in of_stage.items()
        }
        results = self._recording.run(state, read_inputs, computed)
        if results is None:
            self._recording.has_run()  # a step that fails is the last of its runner
            return None
        return self._computed(results)

    def release(self) -> None:
        """Drop the recording, before process groups go: it keeps communicators alive."""
        self._recording.release()

    def _flattened(self, computed: ComputedStep) -> tuple[Tensor, ...]:
        place_of = {
            id(parameter): (index, name)
            for index, stage in self._stages.items()
            for name, parameter in stage.parameters().items()
        }
        flat: list[Tensor] = []
        gradients = []
        for parameter, gradient in computed.gradients:
            leaves, layout = flatten_tensor(gradient)
            gradients.append((*place_of[id(parameter)], layout))
            flat += leaves
        for results in computed.results:
            flat += results
        self._form = _Form(
            gradients=gradients, num_results=[len(results) for results in computed.results]
        )
        return tuple(flat)

    def _computed(self, results: Sequence[Tensor]) -> ComputedStep:
        assert self._form is not None
        left = iter(results)
        parameters = {index: stage.parameters() for index, stage in self._stages.items()}
        gradients = [
            (
                parameters[index][name],
                unflatten_tensor([next(left) for _ in range(layout.num_leaves)], layout),
            )
            for index, name, layout in self._form.gradients
        ]
        losses = tuple(tuple(islice(left, count)) for count in self._form.num_results)
        return ComputedStep(gradients=gradients, results=losses)
