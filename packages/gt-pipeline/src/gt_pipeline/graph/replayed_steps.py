"""A rank's whole step as one CUDA graph: its actions, and the transfers between them.

Where every graph of a rank's stages can be recorded, so can the list of its actions: gathers,
computations, sends and receives, reductions. The recording runs the list as any step does, in the
order of the schedule, so that memory is used again as it is there: nothing is kept for microbatches
in places (``recorded_actions``), and no gathered parameter is copied. Then a step is

1. its microbatches, copied to where the recording reads them, after the same checks as ever;
2. one launch;
3. gradients and losses, copied from where it leaves them: they outlive the next launch.

Parameters and buffers are read where they are. If one has moved, a step runs as it is, and the next
one is recorded anew. Evaluations run as they are.

Why it is built so: docs/decisions/0025-recorded-and-offloading-stages.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from gt_passes.cuda_graphs.cuda_graph_replay import Recorder, Recording
from gt_passes.cuda_graphs.piece_memory import Place, without_repeats
from gt_passes.cuda_graphs.whole_recording import WholeRecording
from gt_passes.errors import CudaGraphAddressError
from gt_pipeline.graph._torch_internals import copy_all
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
class _RecordedStep:
    recording: Recording
    inputs: Sequence[Tensor]
    """Where it reads microbatches."""

    addresses: Mapping[str, int]
    """Of the state that it reads."""


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
        self._how = how
        self._recorder: Recorder | None = None
        self._recorded: _RecordedStep | None = None
        self._form: _Form | None = None
        self._num_steps = 0
        self._num_forgotten = 0

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
        self._num_steps += 1
        if self._num_steps <= self._how.num_warmup_runs:
            return None
        state = {index: stage.state_tensors() for index, stage in self._stages.items()}
        # Another thread may drop it meanwhile: that of a step which has failed elsewhere.
        recorded = self._recorded
        if recorded is not None and self._has_moved(recorded, state):
            return None
        given = [
            [stage.plain_inputs(each) for each in microbatches] for stage in self._stages.values()
        ]
        for stage in self._stages.values():
            stage.check_state()
        if recorded is None:
            self._recorded = recorded = self._record(state, given, compute)
        else:
            _copy(_flat(given), recorded.inputs)
        recorded.recording.replay()
        return self._computed(recorded.recording.outputs)

    def release(self) -> None:
        """Drop the recording, before process groups go: it keeps communicators alive."""
        self._recorded = None
        if self._recorder is not None:
            self._recorder.reset()

    def _has_moved(
        self, recorded: _RecordedStep, state: Mapping[int, Mapping[str, Tensor]]
    ) -> bool:
        """Whether what the recording reads lies elsewhere now; it is dropped then."""
        addresses = _addresses(state)
        if addresses == recorded.addresses:
            return False
        self._num_forgotten += 1
        if self._num_forgotten >= self._how.max_recordings:
            before = recorded.addresses
            moved = [name for name, address in addresses.items() if before.get(name) != address]
            raise CudaGraphAddressError(moved, num_recordings=self._num_forgotten)
        self.release()
        return True

    def _record(
        self,
        state: Mapping[int, Mapping[str, Tensor]],
        given: Sequence[Sequence[Sequence[Tensor]]],
        compute: Callable[[], ComputedStep],
    ) -> _RecordedStep:
        """``given`` are what each stage reads of each microbatch."""
        if self._recorder is None:
            self._recorder = self._how.new_recorder()
        inputs = []
        for each in _flat(given):
            place = Place.of(each)
            inputs.append(place.view(self._recorder.memory(place.end, each.device)))
        _copy(_flat(given), inputs)
        states = [tensor for of_stage in state.values() for tensor in of_stage.values()]

        def piece(*tensors: Tensor) -> tuple[Tensor, ...]:
            left = iter(tensors)
            reads = [tuple(islice(left, len(of_stage))) for of_stage in state.values()]
            for stage, of_state, of_stage in zip(self._stages.values(), reads, given, strict=True):
                stage.reads = StageReads(
                    state=of_state,
                    inputs=tuple(tuple(islice(left, len(each))) for each in of_stage),
                )
            try:
                return self._flattened(compute())
            finally:
                for stage in self._stages.values():
                    stage.reads = None
                    stage.discard()

        recorded = self._recorder.record(piece, [*states, *inputs])
        return _RecordedStep(
            recording=recorded.recording, inputs=inputs, addresses=_addresses(state)
        )

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

    def _computed(self, outputs: Sequence[Tensor]) -> ComputedStep:
        """What the launch has left, copied."""
        assert self._form is not None
        copies = [torch.empty_like(each) for each in outputs]
        if copies:
            copy_all(copies, outputs)
        left = iter(copies)
        parameters = {index: stage.parameters() for index, stage in self._stages.items()}
        gradients = [
            (
                parameters[index][name],
                unflatten_tensor([next(left) for _ in range(layout.num_leaves)], layout),
            )
            for index, name, layout in self._form.gradients
        ]
        results = tuple(tuple(islice(left, count)) for count in self._form.num_results)
        return ComputedStep(gradients=gradients, results=results)


def _addresses(state: Mapping[int, Mapping[str, Tensor]]) -> dict[str, int]:
    return {
        f"stage {index}, {name}": tensor.data_ptr()
        for index, of_stage in state.items()
        for name, tensor in of_stage.items()
    }


def _flat(given: Sequence[Sequence[Sequence[Tensor]]]) -> list[Tensor]:
    return [tensor for of_stage in given for each in of_stage for tensor in each]


def _copy(given: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    for source, target in zip(given, inputs, strict=True):
        without_repeats(target).copy_(without_repeats(source), non_blocking=True)
